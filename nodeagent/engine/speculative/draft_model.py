"""A model that runs ahead: a small one of the same tokens, or a head on the served model.

Rule 1: its KV lies in the blocks of the served model's sequences, under the same numbers. So who
shares a prefix shares it here too, and what is preempted or cancelled leaves nothing behind.
Rule 2: it reads when it is to draft, and never else: a prompt, and what came while it was silent,
is read in portions that a step has time for. Silent, it costs nothing.
Rule 3: what it drafts may be wrong, never harmful: every draft is verified.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.sampling.sampler import likeliest
from nodeagent.engine.scheduler.batching import Batch, Chunk
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Sequence
from nodeagent.engine.speculative.draft_length import StepCosts

_NOTHING = Ending(0, frozenset())


@dataclass(frozen=True, slots=True)
class Habits:
    """What a kind of model that drafts does in its own way."""

    name: str
    """Names the drafter in metrics."""
    skipped: int = 0
    """How many tokens it is behind in place: a head reads each token beside what the model made of
    the one before."""
    pick: Callable[[Tensor], Tensor] = likeliest
    chain: Callable[[bool], None] = lambda going_on: None
    """Told before each pass whether it goes on from its own last one."""


@dataclass(slots=True, eq=False)
class Shadow:
    """One sequence as the model that drafts has read it: what is certain, then drafts."""

    sequence: Sequence
    certain: int = 0


@dataclass(slots=True)
class Ahead:
    """The model that drafts, and what it has read."""

    runner: Runner
    habits: Habits
    clock: Callable[[], float]
    read_tokens_max: int
    context_tokens: int
    share: float
    """What one pass is taken to cost, as a share of the served model's, before it was measured."""
    costs: StepCosts = field(default_factory=StepCosts)
    spent_s: float = 0.0
    """Time taken since it was last asked for."""
    _read: dict[int, bytes] = field(default_factory=dict)
    """The digest of what each block that was read whole held then."""

    def take_spent_s(self) -> float:
        """Return the seconds spent drafting since last asked."""
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s

    def shadow(self, sequence: Sequence) -> Shadow:
        """Return the shadow of a sequence that was not read yet."""
        skipped = self.habits.skipped
        return Shadow(Sequence(sequence.number, sequence.tokens[skipped:], _NOTHING))

    def draft(
        self, wanted: Ordered[tuple[Sequence, Shadow]], depth: int, read_tokens: int
    ) -> list[tuple[int, ...]]:
        """Draft `depth` tokens for each sequence; none yet for one that is still being read.

        About `read_tokens` are read first, of those that are behind. Each has blocks for what is
        known of it and for `depth` tokens more.
        """
        started_s = self.clock()
        for sequence, shadow in wanted:
            self._follow(sequence, shadow)
        chosen = self._catch_up(wanted, read_tokens)
        going_on = list(chosen)
        read_s = self.clock()
        for _ in range(depth - 1 if chosen else 0):
            self._go_on(going_on, chosen)
        ended_s = self.clock()
        if chosen and depth > 1:
            self.costs.note(len(chosen), (ended_s - read_s) / (depth - 1))
        self.spent_s += ended_s - started_s
        return [tuple(chosen.get(shadow, ())) for _, shadow in wanted]

    def _follow(self, sequence: Sequence, shadow: Shadow) -> None:
        """Take over what came of the sequence since, and keep what was read of it rightly."""
        own = shadow.sequence
        fresh = sequence.tokens[shadow.certain + self.habits.skipped :]
        drafted = own.tokens[shadow.certain :]
        held = next(
            (at for at, pair in enumerate(zip(drafted, fresh, strict=False)) if pair[0] != pair[1]),
            min(len(drafted), len(fresh)),
        )
        own.tokens[shadow.certain :] = fresh
        own.computed = min(own.computed, shadow.certain + held)
        if own.blocks is not sequence.blocks:
            own.blocks = sequence.blocks
            own.computed = self._known(sequence)
        shadow.certain = len(own.tokens)
        # At least the last is read anew: what follows it is wanted.
        own.computed = min(own.computed, shadow.certain - 1)

    def _known(self, sequence: Sequence) -> int:
        """Return how much was read already of the tokens in the blocks of `sequence`."""
        whole = sequence.computed // BLOCK_TOKENS
        chain = sequence.chain(whole)
        known = 0
        while known < whole and self._read.get(sequence.blocks[known]) == chain[known]:
            known += 1
        # What a head read last in a block was seen beside the token after it.
        return max(known * BLOCK_TOKENS - self.habits.skipped, 0)

    def _catch_up(
        self, wanted: Ordered[tuple[Sequence, Shadow]], read_tokens: int
    ) -> dict[Shadow, list[int]]:
        """Read what is new, and choose the first draft of each that is read to its end."""
        # Whoever is up to date reads one or two: those never wait for a long prompt.
        left = max(min(read_tokens, self.read_tokens_max), 2 * len(wanted))
        decodes: list[tuple[Shadow, Chunk]] = []
        longer: list[tuple[Shadow, Chunk]] = []
        for sequence, shadow in wanted:
            own = shadow.sequence
            tokens = min(own.pending, left)
            if tokens:
                chunk = Chunk(own, own.computed, tokens)
                (decodes if own.pending == 1 else longer).append((shadow, chunk))
                left -= tokens
                self._note_read(sequence, own.computed, own.computed + tokens)
        decodes.sort(key=lambda pair: pair[1].start)
        order = decodes + longer
        if not order:
            return {}
        self.habits.chain(False)
        logits = self.runner.run(Batch(tuple(c for _, c in decodes), tuple(c for _, c in longer)))
        due = [shadow for shadow, chunk in order if chunk.samples]
        for shadow, chunk in order:
            shadow.sequence.computed += chunk.tokens
        return {
            shadow: [token]
            for shadow, token in zip(
                due, self.habits.pick(logits).tolist() if due else (), strict=True
            )
        }

    def _go_on(self, going_on: list[Shadow], chosen: dict[Shadow, list[int]]) -> None:
        """Read the last draft of each, and choose one more."""
        chunks = []
        for shadow in going_on:
            own = shadow.sequence
            own.tokens.append(chosen[shadow][-1])
            chunks.append(Chunk(own, len(own.tokens) - 1, 1))
            if not self.habits.skipped:
                # A head guesses what the model makes of a draft: if it holds, it is read anew.
                own.computed = len(own.tokens)
        self.habits.chain(True)
        logits = self.runner.run(Batch(tuple(chunks), ()))
        for shadow, token in zip(going_on, self.habits.pick(logits).tolist(), strict=True):
            chosen[shadow].append(token)

    def _note_read(self, sequence: Sequence, start: int, end: int) -> None:
        """Remember which blocks are read whole, and forget those that drafts may overwrite."""
        whole = min(end, sequence.computed) // BLOCK_TOKENS
        chain = sequence.chain(whole)
        for index in range(start // BLOCK_TOKENS, len(sequence.blocks)):
            if index < whole:
                self._read[sequence.blocks[index]] = chain[index]
            else:
                self._read.pop(sequence.blocks[index], None)
