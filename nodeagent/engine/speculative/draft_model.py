"""The draft model: a small model with the same tokens, or an EAGLE-3 head on the target model.

Rule 1: its KV lies in the blocks of the target model's sequences, under the same block numbers.
Shared prefixes are shared here too, and preempted or cancelled sequences leave nothing behind.
Rule 2: it computes only when it is to draft. Prompts, and tokens that came while it was idle, are
then read in portions that fit into a step. An idle draft model costs nothing.
Rule 3: a wrong draft does no harm: the target model verifies each one.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.sampling.sampler import most_likely
from nodeagent.engine.scheduler.batch import Batch, BatchChunk
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.speculative.draft_length import StepCosts

_NEVER_SAMPLED = StopConditions(0, frozenset())


class DraftRunner(Protocol):
    """Runs the draft model; a `ModelRunner` is one."""

    def run(self, batch: Batch) -> Tensor:
        """Compute `batch`; return logits [rows, vocabulary], valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class DraftModelTraits:
    """How one kind of draft model differs from the others."""

    name: str
    """The drafter's name in metrics."""
    skipped_tokens: int = 0
    """How many positions the draft model is behind the target model. An EAGLE-3 head is one behind:
    it reads each token together with the target model's hidden state of the token before."""
    pick: Callable[[Tensor], Tensor] = most_likely
    """Chooses a draft token for each row of logits."""
    set_chained: Callable[[bool], None] = lambda chained: None
    """Called before each pass: whether the pass continues from the draft model's own last one."""


@dataclass(slots=True, eq=False)
class DraftSequence:
    """A sequence as the draft model has read it: its known tokens, then drafts."""

    sequence: Sequence
    known_tokens: int = 0
    """Tokens of the target model's sequence; those after them are drafts."""


class DraftTarget(NamedTuple):
    """A sequence to draft for, and the draft model's copy of it."""

    sequence: Sequence
    draft: DraftSequence


class _ChunkToRead(NamedTuple):
    draft: DraftSequence
    chunk: BatchChunk


@dataclass(slots=True)
class DraftModel:
    """The draft model, and which KV blocks it has read."""

    runner: DraftRunner
    traits: DraftModelTraits
    clock: Callable[[], float]
    read_tokens_max: int
    context_tokens: int
    cost_share: float
    """The assumed cost of one pass, as a share of a target model's pass, before it is measured."""
    costs: StepCosts = field(default_factory=StepCosts)
    _spent_s: float = 0.0
    """Seconds spent since `take_spent_s` was last called."""
    _read_digests: dict[int, bytes] = field(default_factory=dict)
    """The digest of the contents of each completely read block, by block number."""

    def take_spent_s(self) -> float:
        """Return the seconds spent on drafting since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def draft_sequence(self, sequence: Sequence) -> DraftSequence:
        """Return the draft model's copy of a sequence that it has not read yet."""
        skipped = self.traits.skipped_tokens
        return DraftSequence(Sequence(sequence.number, sequence.tokens[skipped:], _NEVER_SAMPLED))

    def draft(
        self, targets: Ordered[DraftTarget], length: int, read_tokens: int
    ) -> list[tuple[int, ...]]:
        """Draft `length` tokens for each target; none for a target whose text is not prefilled yet.

        Before that, about `read_tokens` tokens of pending text are prefilled. Each sequence must
        have blocks for its known tokens and `length` more.
        """
        started_s = self.clock()
        for target in targets:
            self._synchronise(target)
        drafts = self._read_new_text(targets, read_tokens)
        drafting = list(drafts)
        read_s = self.clock()
        for _ in range(length - 1 if drafts else 0):
            self._extend(drafting, drafts)
        ended_s = self.clock()
        if drafts and length > 1:
            self.costs.record(len(drafts), (ended_s - read_s) / (length - 1))
        self._spent_s += ended_s - started_s
        return [tuple(drafts.get(target.draft, ())) for target in targets]

    def _synchronise(self, target: DraftTarget) -> None:
        """Replace drafts by the tokens generated since, and keep the KV that is still valid."""
        sequence, draft = target
        own = draft.sequence
        new = sequence.tokens[draft.known_tokens + self.traits.skipped_tokens :]
        drafted = own.tokens[draft.known_tokens :]
        accepted = next(
            (
                index
                for index, (draft_token, token) in enumerate(zip(drafted, new, strict=False))
                if draft_token != token
            ),
            min(len(drafted), len(new)),
        )
        own.tokens[draft.known_tokens :] = new
        own.computed_tokens = min(own.computed_tokens, draft.known_tokens + accepted)
        if own.blocks is not sequence.blocks:
            own.blocks = sequence.blocks
            own.computed_tokens = self._tokens_read(sequence)
        draft.known_tokens = len(own.tokens)
        # The last token is always read again: its logits give the first draft.
        own.computed_tokens = min(own.computed_tokens, draft.known_tokens - 1)

    def _tokens_read(self, sequence: Sequence) -> int:
        """Return how many tokens in the blocks of `sequence` the draft model has read before."""
        whole = sequence.computed_tokens // BLOCK_TOKENS
        digests = sequence.block_digests(whole)
        blocks = 0
        while blocks < whole and self._read_digests.get(sequence.blocks[blocks]) == digests[blocks]:
            blocks += 1
        # A head reads the last position of a block together with the first token after it.
        return max(blocks * BLOCK_TOKENS - self.traits.skipped_tokens, 0)

    def _read_new_text(
        self, targets: Ordered[DraftTarget], read_tokens: int
    ) -> dict[DraftSequence, list[int]]:
        """Prefill pending text; return the first draft of each sequence that is then complete."""
        # A sequence that is up to date has one or two tokens to read, and never waits for a prompt.
        tokens_left = max(min(read_tokens, self.read_tokens_max), 2 * len(targets))
        decodes: list[_ChunkToRead] = []
        prefills: list[_ChunkToRead] = []
        for sequence, draft in targets:
            own = draft.sequence
            tokens = min(own.pending_tokens, tokens_left)
            if tokens:
                chunk = BatchChunk(own, own.computed_tokens, tokens)
                chunks = decodes if own.pending_tokens == 1 else prefills
                chunks.append(_ChunkToRead(draft, chunk))
                tokens_left -= tokens
                self._record_read(sequence, own.computed_tokens, own.computed_tokens + tokens)
        decodes.sort(key=lambda read: read.chunk.start)
        reads = decodes + prefills
        if not reads:
            return {}
        self.traits.set_chained(False)
        logits = self.runner.run(
            Batch(tuple(read.chunk for read in decodes), tuple(read.chunk for read in prefills))
        )
        sampled = [read.draft for read in reads if read.chunk.samples]
        for draft, chunk in reads:
            draft.sequence.computed_tokens += chunk.tokens
        tokens_drafted = self.traits.pick(logits).tolist() if sampled else ()
        return {draft: [token] for draft, token in zip(sampled, tokens_drafted, strict=True)}

    def _extend(
        self, drafting: list[DraftSequence], drafts: dict[DraftSequence, list[int]]
    ) -> None:
        """Read the last draft of each sequence, and draft one more token."""
        chunks = []
        for draft in drafting:
            own = draft.sequence
            own.tokens.append(drafts[draft][-1])
            chunks.append(BatchChunk(own, len(own.tokens) - 1, 1))
            if not self.traits.skipped_tokens:
                # A head guessed the target's hidden state: an accepted draft must be read again.
                own.computed_tokens = len(own.tokens)
        self.traits.set_chained(True)
        logits = self.runner.run(Batch(tuple(chunks), ()))
        for draft, token in zip(drafting, self.traits.pick(logits).tolist(), strict=True):
            drafts[draft].append(token)

    def _record_read(self, sequence: Sequence, start: int, end: int) -> None:
        """Store the digests of completely read blocks; drop those that drafts may overwrite."""
        whole = min(end, sequence.computed_tokens) // BLOCK_TOKENS
        digests = sequence.block_digests(whole)
        for index in range(start // BLOCK_TOKENS, len(sequence.blocks)):
            if index < whole:
                self._read_digests[sequence.blocks[index]] = digests[index]
            else:
                self._read_digests.pop(sequence.blocks[index], None)
