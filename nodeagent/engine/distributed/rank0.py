"""The front's runner: what it does, the other ranks are told to do first.

What it reads and writes of KV blocks is whole, put together from every rank's share, so that the
tiers below and other engines need not know how this one is split.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.model_step import Work
from nodeagent.engine.distributed.adapter_shards import Given, raw
from nodeagent.engine.distributed.collectives import Ranks
from nodeagent.engine.distributed.commands import Clear, Copy, Read, Write, told
from nodeagent.engine.distributed.shards import Share
from nodeagent.engine.distributed.worker_group import Crew
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS


class Front:
    """A runner of all ranks: this one's, and the crew's."""

    def __init__(self, runner: Runner, crew: Crew, whole: ModelShape, ranks: Ranks) -> None:
        self._runner = runner
        self._crew = crew
        self._whole = whole
        self._ranks = ranks
        self._given = Given(crew, runner, Share(whole, ranks.split))
        self._shares = [Share(whole, ranks.split, rank) for rank in range(ranks.split.ranks)]

    def begin(self, batch: Work) -> Callable[[], Tensor]:
        """Have `batch` computed everywhere, here at once; what is returned waits for its logits."""
        self._given.give(batch.chunks)
        order = told(batch)
        self._crew.tell(order)
        self._runner.run(order)
        return self._ranks.answered

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` everywhere."""
        self._crew.tell(Clear(list(blocks)))
        self._runner.clear(blocks)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks everywhere, each (from, to)."""
        self._crew.tell(Copy(list(pairs)))
        self._runner.copy(pairs)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Return what `blocks` hold: [blocks, layers, tokens, keys and values, head_dim]."""
        answers = self._crew.ask(Read(list(blocks)))
        parts = [self._runner.read_blocks(blocks)]
        for share, answer in zip(self._shares[1:], answers, strict=True):
            parts.append(shaped(answer, len(blocks), share, self._runner.kept_as))
        _, _, tokens, _, width = parts[0].shape
        heads = 2 * self._whole.kv_heads
        whole = parts[0].new_empty(len(blocks), self._whole.layers, tokens, heads, width)
        for share, part in zip(self._shares, parts, strict=True):
            layers, rows = _place(share)
            whole[:, layers.start : layers.stop, :, rows] = part
        return whole

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill `blocks` with what `read_blocks` returned."""
        parts = []
        for share in self._shares:
            layers, rows = _place(share)
            parts.append(contents[:, layers.start : layers.stop][..., rows, :].contiguous())
        numbers = list(blocks)
        self._crew.tell_each([Write(numbers, raw(part)) for part in parts[1:]])
        self._runner.write_blocks(blocks, parts[0])


def shaped(contents: bytes, blocks: int, share: Share, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a share's blocks as such a rank's runner has them."""
    flat = torch.frombuffer(bytearray(contents), dtype=dtype)
    heads = 2 * len(share.kv_heads)
    return flat.view(blocks, len(share.layers), BLOCK_TOKENS, heads, -1)


def _place(share: Share) -> tuple[range, list[int]]:
    """Return the layers of a share, and which rows of keys and values are its own."""
    heads = share.kv_heads
    values = range(share.whole.kv_heads + heads.start, share.whole.kv_heads + heads.stop)
    return share.layers, [*heads, *values]
