"""Where ranks meet: sums within a stage, rows from stage to stage, logits to the front.

Rule 1: all ranks meet in the same order, for all run the same plan.
Rule 2: a wait for another rank has a deadline; past it the step fails, and with it the engine.
Rule 3: with one rank nothing here does anything.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from nodeagent.engine.distributed.shards import ONE, Share, Split
from nodeagent.engine.model.layers.linear import Linear
from nodeagent.engine.model.shape import ModelShape


class Ranks:
    """This process among the ranks."""

    def __init__(self, split: Split = ONE, rank: int = 0) -> None:
        self.split = split
        self.rank = rank
        self._stage: dist.ProcessGroup | None = None
        self._due: deque[Due] = deque()
        """The front's answers that others are still to send."""
        self._afar: dict[int, int] = {}
        """Layers whose inputs the front hears from other ranks: from which."""
        self.told: Callable[[Mapping[int, Tensor]], None] | None = None
        """On the front: told those inputs, once for each step."""
        self.hearing: Callable[[int, Tensor], None] | None = None
        """On others: told what goes into each layer, where the front hears any."""

    def join(self, meeting: Path | Store, device: str, timeout_s: float) -> None:
        """Meet the others, by a file that all here know or by a store that all can reach.

        Raises where not all come in time.
        """
        if self.split.ranks == 1:
            return
        if isinstance(meeting, Path):
            # Ranks share a machine: nobody else is to reach the ports on which they meet.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            meeting = FileStore(str(meeting), self.split.ranks)
        if device != "cpu":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=meeting,
            rank=self.rank,
            world_size=self.split.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        if self.split.tensor == 1:
            return
        for stage in range(self.split.pipeline):
            first = stage * self.split.tensor
            members = list(range(first, first + self.split.tensor))
            group = dist.new_group(members)
            if self.rank in members:
                self._stage = group

    def listen(self, layers: Iterable[int], shape: ModelShape) -> None:
        """Have the front hear what goes into `layers` of the whole model, wherever they are."""
        stages = {rank: Share(shape, self.split, rank) for rank in self.split.firsts}
        ranks = {
            layer: rank for layer in layers for rank, one in stages.items() if layer in one.layers
        }
        if self.rank == 0:
            self._afar = {layer: rank for layer, rank in sorted(ranks.items()) if rank}
        elif self.rank in ranks.values():
            mine = {layer for layer, rank in ranks.items() if rank == self.rank}
            self.hearing = lambda layer, x: dist.send(x.contiguous(), 0) if layer in mine else None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of what each rank of the stage has, in place of `x`."""
        if self.split.tensor > 1:
            dist.all_reduce(x, group=self._stage)
        return x

    def summed(self, linear: Linear) -> Linear:
        """Return the product of a matrix cut by columns."""
        return Summed(linear, self) if self.split.tensor > 1 else linear

    def receive(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return the rows that the stage before has computed."""
        x = torch.empty(rows, columns, device=like.device, dtype=like.dtype)
        dist.recv(x, self.rank - self.split.tensor)
        return x

    def hand_on(self, x: Tensor) -> None:
        """Give the rows to the next stage."""
        dist.send(x.contiguous(), self.rank + self.split.tensor)

    def answer(self, logits: Tensor | None, rows: int, share: Share, x: Tensor) -> Tensor:
        """Give the front its logits [rows, vocabulary]; where ranks are several, it waits for them
        by `answered`, and elsewhere the answer is nobody's.

        `logits` are those of this rank's tokens, or None where it is not in the last stage. `x` is
        what the stage made of the step's tokens.
        """
        if self.split.ranks == 1:
            assert logits is not None
            return logits
        if self.rank == 0:
            self._due.append(self._collect(logits, rows, share, x))
        elif logits is not None and rows:
            dist.send(logits.contiguous(), 0)
        return torch.empty(0, device=x.device)

    def answered(self) -> Tensor:
        """Return the front's oldest answer that was not waited for."""
        due = self._due.popleft()
        for one in due.coming:
            one.wait()
        if self.told is not None:
            self.told(due.heard)
        return torch.cat(due.parts, dim=1)

    def _collect(self, logits: Tensor | None, rows: int, share: Share, x: Tensor) -> "Due":
        due = Due()
        # In the order in which they are sent.
        for layer, rank in self._afar.items():
            due.heard[layer] = torch.empty_like(x)
            due.expect(due.heard[layer], rank)
        for rank in range(self.split.ranks - self.split.tensor, self.split.ranks):
            if rank == 0 and logits is not None:
                due.parts.append(logits)
                continue
            part = torch.empty(rows, len(share.tokens_of(rank)), device=x.device)
            if rows:
                due.expect(part, rank)
            due.parts.append(part)
        return due


@dataclass(slots=True)
class Due:
    """What others are still to send of one step."""

    parts: list[Tensor] = field(default_factory=list)
    """Logits, by the tokens of each rank."""
    heard: dict[int, Tensor] = field(default_factory=dict)
    """What went into layers elsewhere."""
    coming: list[dist.Work] = field(default_factory=list)

    def expect(self, part: Tensor, rank: int) -> None:
        """Have `part` filled with what `rank` sends next."""
        receiving = dist.irecv(part, rank)
        if receiving is not None:
            self.coming.append(receiving)


ALONE: Final = Ranks()


class Summed:
    """A product of which each rank of a stage has a part."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, and add up."""
        return self._ranks.sum(self._linear(x))
