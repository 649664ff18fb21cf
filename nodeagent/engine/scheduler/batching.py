"""Who runs in the next step: decodes first, then chunks of prompts in what is left of the budget.

Rule 1: a step computes at most `batch_tokens_max` tokens. As that exceeds `sequences_max`, every
decoding sequence runs in every step, and every step has room for some prompt tokens too. Beside
decodes, prompts get no more tokens than `pace` allows, so that the next token comes in time.
Rule 2: who has the earlier turn goes first (`turns`). When blocks run out the running sequence with
the latest turn gives its own back and waits again at its old place; so the first always moves, and
by it everyone in the end.
Rule 3: where no more can run, a request of higher priority takes the place of one of lower, unless
that one has waited so long that its turn is the earlier: it would come back at once.
Rule 4: a request whose deadline passes before its first token is given up.
Rule 5: a prompt's blocks are taken whole when it is admitted; afterwards only outputs grow.
Rule 6: what lies below the device is brought back where that is faster than computing it (`trade`).
Rule 7: drafts run only where nobody pays for them: no prompt waits, and blocks are to spare.
Rule 8: a request of several answers is seated whole: its first sequence computes the prompt, and
keeps the others' places among those that run until they go on from there.
Rule 9: where several steps are under way, they are of disjoint decodes, each of its even part of
them. They are computed in the order in which they began, so what has begun counts as computed for
all that begins later: a prompt's next chunk need not wait for the last.
"""

from bisect import insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.scheduler.fair_queue import Turns
from nodeagent.engine.scheduler.pipeline_depth import Underway
from nodeagent.engine.scheduler.prefill_budget import Pace
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Sequence
from nodeagent.engine.scheduler.swap_or_recompute import Trade


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
    """Part of a step: compute tokens [start, start + tokens) of one sequence.

    The last of them may be drafts, which follow what is known of the sequence.
    """

    sequence: Sequence
    start: int
    tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[int]:
        """The KV blocks of its sequence."""
        return self.sequence.blocks

    @property
    def adapter(self) -> object | None:
        """What is added to the model for it."""
        return self.sequence.adapter

    @property
    def samples(self) -> bool:
        """True where this chunk reaches the end of what is known, so a next token is due."""
        return self.start + self.tokens - len(self.drafts) == len(self.sequence.tokens)

    @property
    def ids(self) -> list[int]:
        """The tokens themselves."""
        return [*self.sequence.tokens[self.start : self.start + self.tokens], *self.drafts]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes (one token each), decodes with drafts, and prompt chunks."""

    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]
    late: tuple[Sequence, ...] = ()
    """Given up: their deadlines passed before their first tokens."""
    evicted: tuple[tuple[int, bytes], ...] = ()
    """(block, digest) of what blocks held before this step got them: save it first, or lose it."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to) of blocks to be copied once what was evicted is saved: a step writes to `to`."""
    restores: tuple[tuple[int, bytes], ...] = ()
    """(block, digest) of what must come from the tiers below once all is copied."""
    verifies: tuple[Chunk, ...] = ()
    """Decodes with drafts."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Decodes, then what has several tokens: the order of rows in the flat batch."""
        return self.decodes + self.segments

    @property
    def segments(self) -> tuple[Chunk, ...]:
        """Decodes with drafts, then prefills."""
        return self.verifies + self.prefills

    @property
    def tokens(self) -> int:
        """Tokens that this step computes."""
        return len(self.decodes) + sum(chunk.tokens for chunk in self.segments)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens among them."""
        return sum(chunk.tokens for chunk in self.prefills)


@dataclass(slots=True)
class Batching:
    """The queue and the running set, and the one decision over them."""

    limits: Limits
    blocks: Blocks
    pace: Pace = field(default_factory=lambda: Pace(float("inf")))
    turns: Turns = field(default_factory=Turns)
    trade: Trade = field(default_factory=Trade)
    underway: Underway = field(default_factory=Underway)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    kept_tokens: int = 0
    """Tokens of those who gave way that were still there, or brought back, when they ran on."""
    lost_tokens: int = 0
    """Those that had to be computed again."""
    below: Container[bytes] = frozenset()
    """The digests that the tiers below the device hold."""
    _restores: dict[int, bytes] = field(default_factory=dict)
    _copies: dict[int, int] = field(default_factory=dict)
    """From which block each is copied."""

    @property
    def busy(self) -> bool:
        """True where a step would have work."""
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue `sequence`; the caller holds it to tokens_max and bounds the queue."""
        sequence.turn = self.turns.give(
            sequence.standing,
            sequence.prompt_tokens,
            sequence.ending.tokens_max,
            1 + len(sequence.followers),
        )
        insort(self.waiting, sequence, key=_turn)

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

    def next_batch(self, now_s: float = 0.0) -> Batch:
        """Decide the next step."""
        late = self._give_up(now_s)
        preemptions = self.preemptions
        decodes, verifies = self._decodes()
        budget = self.limits.batch_tokens_max - len(decodes)
        budget = self.pace.prompt_tokens(len(decodes), budget)
        prefills: list[Chunk] = []
        for sequence in self.running:
            if budget and sequence.pending and not sequence.decoding:
                budget -= self._chunk(sequence, budget, prefills)
        # Whoever just gave way would come back at once, only to give way again.
        while budget and self.waiting and self.preemptions == preemptions:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                gave_way = self._make_way(sequence, decodes, prefills)
                if gave_way is None:
                    break
                budget += gave_way
                preemptions = self.preemptions
                continue
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_turn)
            budget -= self._chunk(sequence, budget, prefills)
        evicted = tuple(self.blocks.take_evicted())
        restores = tuple(self._restores.items())
        self._restores.clear()
        copies = tuple((source, block) for block, source in self._copies.items())
        self._copies.clear()
        batch = Batch(
            tuple(decodes), tuple(prefills), late, evicted, copies, restores, tuple(verifies)
        )
        self.turns.pass_by(batch.tokens)
        return batch

    @property
    def drafting(self) -> bool:
        """True where the coming step may verify drafts."""
        return not self.waiting and all(
            sequence.decoding or not sequence.pending for sequence in self.running
        )

    @property
    def underway_now(self) -> int:
        """How many steps may be under way."""
        if self.underway.most == 1:
            return 1
        prompts = bool(self.waiting) or any(s.pending > 1 for s in self.running)
        return self.underway.choose(self._answering(), prompts=prompts)

    def begun(self, batch: Batch) -> None:
        """Note that `batch` is under way: whatever begins later finds its KV, but for drafts."""
        for chunk in batch.chunks:
            chunk.sequence.computed = chunk.start + chunk.tokens - len(chunk.drafts)

    def computed(self, chunk: Chunk, refused: int = 0) -> None:
        """Note that `chunk` has run: its KV is there, and its whole blocks can be shared.

        The last `refused` of its drafts did not hold: their KV is void and will be written over.
        """
        sequence, end = chunk.sequence, chunk.start + chunk.tokens - refused
        # A later chunk of it may have begun.
        sequence.computed = max(sequence.computed, end)
        whole = end // BLOCK_TOKENS
        chain = sequence.chain(whole)
        for index in range(sequence.published, whole):
            self.blocks.publish(sequence.blocks[index], chain[index])
        sequence.published = max(sequence.published, whole)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Have the followers of `sequence` go on from its prompt, just computed; return them."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.turn = sequence.turn
            follower.blocks = self.blocks.share(sequence.blocks)
            follower.computed, follower.published = sequence.computed, sequence.published
            follower.admitted = True
            insort(self.running, follower, key=_turn)
        return followers

    def _decodes(self) -> tuple[list[Chunk], list[Chunk]]:
        """Give each decoding sequence its token, first turn first, preempting the last."""
        decodes: list[Chunk] = []
        verifies: list[Chunk] = []
        drafting = self.drafting
        parts = self.underway_now
        most = len(self.running) if parts == 1 else -(-self._answering() // parts)
        for sequence in list(self.running):
            if len(decodes) + len(verifies) == most:
                break
            if sequence not in self.running or not sequence.decoding:
                continue
            if not self._grow(sequence):
                continue
            drafts = self._room_for_drafts(sequence) if drafting else ()
            chunk = Chunk(sequence, sequence.computed, 1 + len(drafts), drafts)
            (verifies if drafts else decodes).append(chunk)
        # Neighbours of like length share one call of attention.
        return sorted(decodes, key=_context), verifies

    def _answering(self) -> int:
        """Return how many sequences decode, those under way included."""
        return sum(sequence.decoding or not sequence.pending for sequence in self.running)

    def make_room(self, sequence: Sequence, drafts: int) -> int:
        """Take blocks for drafts where many are free; return how many of them fit."""
        length = len(sequence.tokens) + drafts
        missing = -(-length // BLOCK_TOKENS) - len(sequence.blocks)
        if missing > 0 and self.blocks.free > missing + len(self.running):
            sequence.blocks.extend(self.blocks.take((), missing) or ())
        room = len(sequence.blocks) * BLOCK_TOKENS - len(sequence.tokens)
        return min(drafts, max(room, 0))

    def _room_for_drafts(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the sequence's drafts that fit."""
        drafts, sequence.drafts = sequence.drafts, ()
        return drafts[: self.make_room(sequence, len(drafts))]

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token; False where `sequence` itself had to give way."""
        while (short := sequence.blocks_needed() > len(sequence.blocks)) or self._shares(sequence):
            if self._take_block(sequence) if short else self._part(sequence):
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _take_block(self, sequence: Sequence) -> bool:
        taken = self.blocks.take((), 1)
        sequence.blocks.extend(taken or ())
        return taken is not None

    def _shares(self, sequence: Sequence) -> bool:
        """Whether others hold the block that the next token is written to."""
        return self.blocks.holders(sequence.blocks[sequence.computed // BLOCK_TOKENS]) > 1

    def _part(self, sequence: Sequence) -> bool:
        """Give `sequence` a copy of that block for its own; False where none is free."""
        index = sequence.computed // BLOCK_TOKENS
        own = self.blocks.part(sequence.blocks[index])
        if own is None:
            return False
        self._copies[own] = sequence.blocks[index]
        # A new list: whoever noted what lies in the old one's blocks must look again.
        sequence.blocks = [*sequence.blocks[:index], own, *sequence.blocks[index + 1 :]]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        insort(self.waiting, sequence, key=_turn)

    def _give_up(self, now_s: float) -> tuple[Sequence, ...]:
        late = tuple(
            sequence
            for sequence in (*self.waiting, *self.running)
            if sequence.standing.deadline_s is not None
            and sequence.standing.deadline_s <= now_s
            and not sequence.output_tokens
        )
        for sequence in late:
            self.remove(sequence)
        return late

    def _make_way(
        self, sequence: Sequence, decodes: list[Chunk], prefills: list[Chunk]
    ) -> int | None:
        """Preempt the last of lower priority and later turn; return the tokens that it leaves."""
        lower = [
            running
            for running in self.running
            if running.standing.priority < sequence.standing.priority
            and _turn(running) > _turn(sequence)
        ]
        freed = self.blocks.free + sum(len(running.blocks) for running in lower)
        seats = self._seats_free() + _seats(lower)
        if not lower or freed < sequence.blocks_needed() or seats < _seats([sequence]):
            return None
        self._preempt(lower[-1])
        left = 0
        for chunks in (decodes, prefills):
            for chunk in [chunk for chunk in chunks if chunk.sequence is lower[-1]]:
                chunks.remove(chunk)
                left += chunk.tokens
        return left

    def _admit(self, sequence: Sequence) -> bool:
        """Take the blocks of all known tokens, the remembered ones first; False where too few."""
        if self._seats_free() < _seats([sequence]):
            return False
        # At least one token is computed anew: the last one's logits are what is wanted.
        chain = sequence.chain((len(sequence.tokens) - 1) // BLOCK_TOKENS)
        remembered = self.blocks.match(chain)
        below = list(takewhile(self.below.__contains__, chain[len(remembered) :]))
        if below and not self.trade.pays(self.pace.prompt_token_s):
            below = []
        taken = self.blocks.take(remembered, sequence.blocks_needed() - len(remembered))
        if taken is None:
            return False
        sequence.blocks = taken
        self._restores |= zip(taken[len(remembered) :], below, strict=False)
        sequence.computed = (len(remembered) + len(below)) * BLOCK_TOKENS
        sequence.published = len(remembered)
        if sequence.admitted:
            self.kept_tokens += sequence.computed
            self.lost_tokens += len(sequence.tokens) - sequence.computed
        else:
            sequence.admitted = True
            sequence.cached_tokens = sequence.computed
        return True

    def _seats_free(self) -> int:
        return self.limits.sequences_max - _seats(self.running)

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        tokens = min(sequence.pending, budget)
        chunks.append(Chunk(sequence, sequence.computed, tokens))
        return tokens

    def _release(self, sequence: Sequence) -> None:
        # Who gives way in the step that admitted it needs nothing brought back or copied.
        for block in sequence.blocks:
            self._restores.pop(block, None)
            self._copies.pop(block, None)
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.published = 0
        sequence.drafts = ()


def _context(chunk: Chunk) -> int:
    return chunk.start


def _seats(sequences: Iterable[Sequence]) -> int:
    """Return how many run, or will by these."""
    return sum(1 + len(sequence.followers) for sequence in sequences)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn, sequence.number
