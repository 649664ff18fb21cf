"""Who runs in the next step: decodes first, then chunks of prompts in what is left of the budget.

Rule 1: a step computes at most `batch_tokens_max` tokens. As that exceeds `sequences_max`, every
decoding sequence runs in every step (a long prompt delays it by one step's length at most), and
every step has room for some prompt tokens too.
Rule 2: first come, first served. When blocks run out the youngest running sequence gives its own
back and waits again at its old place; so the oldest always moves, and by it everyone in the end.
Rule 3: a prompt's blocks are taken whole when it is admitted; afterwards only outputs grow.
"""

from bisect import insort
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import takewhile

from nodeagent.engine.decide.blocks import Blocks
from nodeagent.engine.decide.sequence import BLOCK_TOKENS, Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one step."""

    batch_tokens_max: int
    sequences_max: int

    def __post_init__(self) -> None:
        if self.sequences_max < 1 or self.batch_tokens_max <= self.sequences_max:
            raise ValueError(
                f"cannot batch {self.batch_tokens_max} tokens for {self.sequences_max} sequences:"
                " batch_tokens_max must exceed sequences_max, and that must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute tokens [start, start + tokens) of one sequence."""

    sequence: Sequence
    start: int
    tokens: int

    @property
    def samples(self) -> bool:
        """True where this chunk reaches the end of what is known, so a next token is due."""
        return self.start + self.tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes (one token each) and prompt chunks."""

    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]
    evicted: tuple[tuple[int, bytes], ...] = ()
    """(block, digest) of what blocks held before this step got them: save it first, or lose it."""
    restores: tuple[tuple[int, bytes], ...] = ()
    """(block, digest) of what must come from the tiers below before this step runs."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Decodes, then prefills: the order of rows in the flat batch."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """Tokens that this step computes."""
        return len(self.decodes) + self.prefill_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens among them."""
        return sum(chunk.tokens for chunk in self.prefills)


@dataclass(slots=True)
class Batching:
    """The queue and the running set, and the one decision over them."""

    limits: Limits
    blocks: Blocks
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    below: Container[bytes] = frozenset()
    """The digests that the tiers below the device hold."""
    _restores: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """True where a step would have work."""
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue `sequence`; the caller holds it to tokens_max and bounds the queue."""
        self.waiting.append(sequence)

    @property
    def tokens_max(self) -> int:
        """The longest sequence that can run at least alone."""
        return self.blocks.total * BLOCK_TOKENS

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def next_batch(self) -> Batch:
        """Decide the next step."""
        preemptions = self.preemptions
        decodes = self._decodes()
        budget = self.limits.batch_tokens_max - len(decodes)
        prefills: list[Chunk] = []
        for sequence in self.running:
            if budget and not sequence.decoding:
                budget -= self._chunk(sequence, budget, prefills)
        if self.preemptions > preemptions:
            # Whoever just gave way would come back at once, only to give way again.
            return self._batch(decodes, prefills)
        while budget and self.waiting and len(self.running) < self.limits.sequences_max:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            insort(self.running, sequence, key=_age)
            budget -= self._chunk(sequence, budget, prefills)
        return self._batch(decodes, prefills)

    def _batch(self, decodes: list[Chunk], prefills: list[Chunk]) -> Batch:
        evicted = tuple(self.blocks.take_evicted())
        restores, self._restores = tuple(self._restores), []
        return Batch(tuple(decodes), tuple(prefills), evicted, restores)

    def computed(self, chunk: Chunk) -> None:
        """Note that `chunk` has run: its KV is there, and its whole blocks can be shared."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.tokens
        whole = sequence.computed // BLOCK_TOKENS
        chain = sequence.chain(whole)
        for index in range(sequence.published, whole):
            self.blocks.publish(sequence.blocks[index], chain[index])
        sequence.published = max(sequence.published, whole)

    def _decodes(self) -> list[Chunk]:
        """Give each decoding sequence its token, oldest first, preempting the youngest."""
        decodes: list[Chunk] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.decoding:
                continue
            if self._grow(sequence):
                decodes.append(Chunk(sequence, sequence.computed, 1))
        # Neighbours of like length share one call of attention.
        return sorted(decodes, key=_context)

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token; False where `sequence` itself had to give way."""
        while sequence.blocks_needed() > len(sequence.blocks):
            taken = self.blocks.take((), 1)
            if taken is not None:
                sequence.blocks.extend(taken)
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        index = next(
            (i for i, other in enumerate(self.waiting) if other.number > sequence.number),
            len(self.waiting),
        )
        self.waiting.insert(index, sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Take the blocks of all known tokens, the remembered ones first; False where too few."""
        # At least one token is computed anew: the last one's logits are what is wanted.
        chain = sequence.chain((len(sequence.tokens) - 1) // BLOCK_TOKENS)
        remembered = self.blocks.match(chain)
        below = list(takewhile(self.below.__contains__, chain[len(remembered) :]))
        taken = self.blocks.take(remembered, sequence.blocks_needed() - len(remembered))
        if taken is None:
            return False
        sequence.blocks = taken
        self._restores += zip(taken[len(remembered) :], below, strict=False)
        sequence.computed = (len(remembered) + len(below)) * BLOCK_TOKENS
        sequence.published = len(remembered)
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = sequence.computed
        return True

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        tokens = min(sequence.pending, budget)
        chunks.append(Chunk(sequence, sequence.computed, tokens))
        return tokens

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.published = 0


def _context(chunk: Chunk) -> int:
    return chunk.start


def _age(sequence: Sequence) -> int:
    return sequence.number
