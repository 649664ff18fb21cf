"""Exchanges tensors between ranks: sums within a stage, rows between stages, logits to rank 0.

Rule 1: all ranks communicate in the same order, because all run the same batches.
Rule 2: a wait for another rank has a deadline; after it the step fails, and with it the engine.
Rule 3: with a single rank nothing here communicates.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.distributed.shards import NOT_SPLIT, ModelShard, ParallelConfig


class LinearProduct(Protocol):
    """Multiplies rows by a matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [rows, columns in] times the matrix: [rows, columns out]."""
        ...


class Communicator:
    """This process's connection to the other ranks."""

    def __init__(self, split: ParallelConfig = NOT_SPLIT, rank: int = 0) -> None:
        self.split = split
        self.rank = rank
        self._stage: dist.ProcessGroup | None = None
        self._pending: deque[PendingLogits] = deque()
        """On rank 0: the logits of batches in flight."""
        self._remote_layers: dict[int, int] = {}
        """On rank 0: the rank that computes each layer whose input is sent here."""
        self.on_layer_inputs: Callable[[Mapping[int, Tensor]], None] | None = None
        """On rank 0: called with those inputs, once for each step."""
        self.send_layer_input: Callable[[int, Tensor], None] | None = None
        """On other ranks: called with the input of each layer, if rank 0 needs any."""

    def connect(self, rendezvous: Path | Store, device: str, timeout_s: float) -> None:
        """Connect to the other ranks through a file on this machine, or a store all can reach.

        Raises if they do not all connect within `timeout_s`.
        """
        if self.split.ranks == 1:
            return
        if isinstance(rendezvous, Path):
            # All ranks are on this machine: their ports must not be reachable from others.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            rendezvous = FileStore(str(rendezvous), self.split.ranks)
        if device != "cpu":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=rendezvous,
            rank=self.rank,
            world_size=self.split.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        if self.split.tensor == 1:
            return
        for first in self.split.first_ranks:
            ranks = list(range(first, first + self.split.tensor))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self._stage = group

    def forward_layer_inputs(self, layers: Iterable[int], shape: DecoderShape) -> None:
        """Have the inputs of `layers` of the whole model sent to rank 0."""
        stages = {rank: ModelShard(shape, self.split, rank) for rank in self.split.first_ranks}
        rank_of = {
            layer: rank
            for layer in layers
            for rank, shard in stages.items()
            if layer in shard.layers
        }
        if self.rank == 0:
            self._remote_layers = {layer: rank for layer, rank in sorted(rank_of.items()) if rank}
        elif self.rank in rank_of.values():
            own = {layer for layer, rank in rank_of.items() if rank == self.rank}
            self.send_layer_input = lambda layer, x: (
                dist.send(x.contiguous(), 0) if layer in own else None
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks of the stage, in place; return it."""
        if self.split.tensor > 1:
            dist.all_reduce(x, group=self._stage)
        return x

    def row_parallel(self, linear: LinearProduct) -> LinearProduct:
        """Return the product by a matrix of which each rank of the stage has some columns."""
        return RowParallelLinear(linear, self) if self.split.tensor > 1 else linear

    def receive_rows(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return the rows [rows, columns] that the previous stage has computed."""
        x = torch.empty(rows, columns, device=like.device, dtype=like.dtype)
        dist.recv(x, self.rank - self.split.tensor)
        return x

    def send_rows(self, x: Tensor) -> None:
        """Send the computed rows to the next stage."""
        dist.send(x.contiguous(), self.rank + self.split.tensor)

    def gather_logits(
        self, logits: Tensor | None, rows: int, shard: ModelShard, x: Tensor
    ) -> Tensor:
        """Send the logits of this rank to rank 0; with a single rank return them.

        With several ranks rank 0 gets all logits [rows, vocabulary] from `wait_logits`, and the
        tensor returned here is empty. `logits` are those of this rank's tokens, or None if it is
        not in the last stage. `x` is the stage's output for the tokens of the step.
        """
        if self.split.ranks == 1:
            assert logits is not None
            return logits
        if self.rank == 0:
            self._pending.append(self._receive_logits(logits, rows, shard, x))
        elif logits is not None and rows:
            dist.send(logits.contiguous(), 0)
        return torch.empty(0, device=x.device)

    def wait_logits(self) -> Tensor:
        """Wait for the logits [rows, vocabulary] of the oldest batch in flight. On rank 0."""
        pending = self._pending.popleft()
        for receiving in pending.receiving:
            receiving.wait()
        if self.on_layer_inputs is not None:
            self.on_layer_inputs(pending.layer_inputs)
        return torch.cat(pending.parts, dim=1)

    def _receive_logits(
        self, logits: Tensor | None, rows: int, shard: ModelShard, x: Tensor
    ) -> "PendingLogits":
        pending = PendingLogits()
        # In the order in which the other ranks send them.
        for layer, rank in self._remote_layers.items():
            pending.layer_inputs[layer] = torch.empty_like(x)
            pending.receive(pending.layer_inputs[layer], rank)
        for rank in range(self.split.ranks - self.split.tensor, self.split.ranks):
            if rank == 0 and logits is not None:
                pending.parts.append(logits)
                continue
            part = torch.empty(rows, len(shard.tokens_of(rank)), device=x.device)
            if rows:
                pending.receive(part, rank)
            pending.parts.append(part)
        return pending


@dataclass(slots=True)
class PendingLogits:
    """The logits of one batch that rank 0 is still receiving."""

    parts: list[Tensor] = field(default_factory=list)
    """The logits of each rank's tokens, in the order of ranks."""
    layer_inputs: dict[int, Tensor] = field(default_factory=dict)
    """The inputs of layers that other ranks compute."""
    receiving: list[dist.Work] = field(default_factory=list)

    def receive(self, part: Tensor, rank: int) -> None:
        """Start to fill `part` with what `rank` sends next."""
        receiving = dist.irecv(part, rank)
        if receiving is not None:
            self.receiving.append(receiving)


SINGLE_RANK: Final = Communicator()


class RowParallelLinear:
    """A matrix product summed over the ranks of a stage, each of which has some of its columns.

    Megatron-LM calls this row parallel, because it writes the matrix transposed.
    """

    def __init__(self, linear: LinearProduct, communicator: Communicator) -> None:
        self._linear = linear
        self._communicator = communicator

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products."""
        return self._communicator.all_reduce(self._linear(x))
