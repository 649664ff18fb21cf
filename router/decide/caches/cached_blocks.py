"""The blocks of one simulated prefix cache: their sizes, and the order of their last use.

The compiled request path has them in C (`block_table.c`): each request uses all blocks of its
prompt, up to KEYS_MAX of them. Without it an OrderedDict is used, with the same results.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from isochrone.native_class import mypyc_attr

ANSWER_S: Final = 5.0
"""How long an answer is assumed to use its prompt's blocks, until its end is learned. An engine
keeps them to the end, but with 60 s here, what is evicted was noticed too late to be of use
(ops/sim/cache_knowledge.md)."""

UNDONE: Final = -1
"""Value of `PromptUse.held` for a prompt that the replica did not read."""


@mypyc_attr(acyclic=True, free_list_len=1)
class PromptUse:
    """The times at which a prompt was sent to a replica, and last used its blocks there.

    An answer is assumed to take ANSWER_S while it is in flight, or if its end is never learned.
    `held` is how many of its first blocks are held because of other prompts, UNDONE if the replica
    did not read the prompt.
    """

    __slots__ = ("ended_at_s", "held", "sent_at_s")

    def __init__(self, sent_at_s: float) -> None:
        self.sent_at_s = sent_at_s
        self.ended_at_s = sent_at_s + ANSWER_S
        self.held = 0


class CachedBlocks(Protocol):
    """The blocks of one cache by key. A method that takes the key of a block raises KeyError."""

    @property
    def size(self) -> int:
        """The sum of the sizes of all blocks."""

    @property
    def inserted(self) -> int:
        """The sum of the sizes of all blocks ever inserted."""

    def __len__(self) -> int:
        """Return the number of blocks."""

    def __contains__(self, key: object) -> bool:
        """Return whether a block is held."""

    def use(
        self, keys: Sequence[int], ends: Sequence[int], use: PromptUse
    ) -> tuple[list[int], int, int]:
        """Make a prompt's blocks the ones used last, inserting those that are missing.

        Blocks end at the offsets `ends`. The first block of the prompt counts as used last, so that
        the end of a prompt is evicted before its beginning, as engines do. Each call has a `use` of
        its own. Return the keys of the inserted blocks; the index of the last block that was held
        before, -1 if none was; and how much had been inserted since that one's use before this.
        """

    def use_of(self, key: int) -> PromptUse:
        """Return the last use of a block."""

    def oldest(self) -> int | None:
        """Return the key of the block whose last use is the longest ago, None without blocks."""

    def oldest_use(self) -> PromptUse | None:
        """Return the last use of that block."""

    def sent_before(self, time_s: float) -> list[int]:
        """Return the keys of the least recently used blocks, up to the first sent since then."""

    def remove(self, key: int) -> None:
        """Remove a block."""

    def oldest_first(self) -> list[int]:
        """Return the keys of all blocks, the least recently used first."""


class _CachedBlock:
    """One block: its size, and its last use."""

    __slots__ = ("size", "use", "used_at_inserted")

    def __init__(self, size: int, used_at_inserted: int, use: PromptUse) -> None:
        self.size = size
        self.used_at_inserted = used_at_inserted
        """The cache's `inserted` at the last use."""
        self.use = use


class BlocksInPython:
    """The blocks of one cache, in an OrderedDict."""

    __slots__ = ("_blocks", "inserted", "size")

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, _CachedBlock] = OrderedDict()
        self.inserted = 0
        self.size = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        """Return whether a block is held."""
        return key in self._blocks

    def use(
        self, keys: Sequence[int], ends: Sequence[int], use: PromptUse
    ) -> tuple[list[int], int, int]:
        """See CachedBlocks."""
        blocks, inserted_before = self._blocks, self.inserted
        added: list[int] = []
        deepest, since_use = -1, 0
        for index in range(len(keys) - 1, -1, -1):
            key = keys[index]
            block = blocks.get(key)
            if block is None:
                size = ends[index] - ends[index - 1] if index else ends[index]
                self.size += size
                self.inserted += size
                blocks[key] = _CachedBlock(size, self.inserted, use)
                added.append(key)
            else:
                # A block that a prompt has twice was not held before.
                if deepest < 0 and block.use is not use:
                    deepest, since_use = index, inserted_before - block.used_at_inserted
                block.used_at_inserted, block.use = self.inserted, use
                blocks.move_to_end(key)
        return added, deepest, since_use

    def use_of(self, key: int) -> PromptUse:
        """See CachedBlocks."""
        return self._blocks[key].use

    def oldest(self) -> int | None:
        """See CachedBlocks."""
        return next(iter(self._blocks), None)

    def oldest_use(self) -> PromptUse | None:
        """See CachedBlocks."""
        for block in self._blocks.values():
            return block.use
        return None

    def sent_before(self, time_s: float) -> list[int]:
        """See CachedBlocks."""
        found: list[int] = []
        for key, block in self._blocks.items():
            if block.use.sent_at_s >= time_s:
                break
            found.append(key)
        return found

    def remove(self, key: int) -> None:
        """See CachedBlocks."""
        self.size -= self._blocks.pop(key).size

    def oldest_first(self) -> list[int]:
        """See CachedBlocks."""
        return list(self._blocks)


new_cached_blocks: Callable[[], CachedBlocks] = BlocksInPython

with suppress(ImportError):
    new_cached_blocks = importlib.import_module("router.decide.caches.block_table").BlockTable
