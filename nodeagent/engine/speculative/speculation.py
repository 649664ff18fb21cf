"""Speculative decoding: drafts for the decoding sequences of a step, and learning from the results.

There are three drafters with one interface: n-grams of the text (`ngram`), a grammar that allows
only one token, and a draft model (`draft_model`) if the engine has one.

Rule 1: speculation is lossless. A step samples at each drafted position as it would without drafts,
and continues only while the sampled token equals the draft. For a draft that is one certain token
this is rejection sampling: the draft is accepted with the target model's own probability, and
otherwise replaced by a sample of the rest. The draws come from the same generator, so even a seeded
output does not change.
Rule 2: a constrained sequence is drafted by its grammar where the grammar allows one token, and no
draft that the grammar forbids is verified.
Rule 3: drafts that are not verified are still compared with the sampled tokens, so a source that
was turned off for its failures is turned on again when it would succeed.
Rule 4: a draft model runs while its passes pay off. While they do not, it is tried now and then.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nodeagent.engine.sampling.sampler import InvalidLogits, SampledToken
from nodeagent.engine.scheduler.sequence import Sequence
from nodeagent.engine.speculative.draft_length import (
    AcceptanceRates,
    DraftProposal,
    StepCosts,
    best_expected_gain,
    choose_draft_lengths,
    choose_model_draft_length,
)
from nodeagent.engine.speculative.draft_model import DraftModel, DraftSequence, DraftTarget
from nodeagent.engine.speculative.ngram import NgramProposer
from nodeagent.engine.structured.constraint import Constraint

_FORCED: Final = "forced"
_LOOKUP: Final = "lookup"
_DECAY_PER_STEP: Final = 0.95
_TRIAL_INTERVAL_STEPS: Final = 64
"""Steps between two trials of a draft model that does not pay off."""
_TRIAL_LENGTH: Final = 2


class DraftOutcome(NamedTuple):
    """A verified draft: the kind of its source, and whether it was accepted."""

    kind: str
    accepted: bool


class _SourcedDraft(NamedTuple):
    tokens: list[int]
    sources: list[str]
    """The kind of source of each token, with the length of the match or its position."""


@dataclass(slots=True)
class Drafter:
    """The drafts of one sequence: where they come from, and how often they are accepted."""

    ngrams: NgramProposer
    acceptance: AcceptanceRates
    constraint: Constraint | None = None
    draft_sequence: DraftSequence | None = None
    """The draft model's copy of the sequence; None until the model first drafts for it."""
    _tokens: tuple[int, ...] = ()
    _sources: tuple[str, ...] = ()

    def propose(
        self,
        sequence: Sequence,
        count: int,
        model_drafts: Ordered[int] = (),
        model_name: str = "",
    ) -> DraftProposal:
        """Draft up to `count` tokens: `model_drafts` if the draft model made any, else others."""
        if count < 1:
            return DraftProposal((), ())
        self.ngrams.follow(sequence.tokens)
        if self.constraint is not None:
            draft = self._constrained(self.constraint, count, model_drafts, model_name)
        elif model_drafts:
            sources = [_source(model_name, index) for index in range(len(model_drafts))]
            draft = _SourcedDraft(list(model_drafts), sources)
        else:
            tokens, matched = self.ngrams.propose(count)
            draft = _SourcedDraft(tokens, [_source(_LOOKUP, matched)] * len(tokens))
        self._tokens, self._sources = tuple(draft.tokens), tuple(draft.sources)
        chance, chances = 1.0, []
        for source in draft.sources:
            chance *= self.acceptance.chance(source)
            chances.append(chance)
        return DraftProposal(self._tokens, tuple(chances))

    def target(self, model: DraftModel, sequence: Sequence) -> DraftTarget:
        """Return the sequence with the draft model's copy of it, made when first needed."""
        if self.draft_sequence is None:
            self.draft_sequence = model.draft_sequence(sequence)
        return DraftTarget(sequence, self.draft_sequence)

    def _constrained(
        self, constraint: Constraint, count: int, model_drafts: Ordered[int], model_name: str
    ) -> _SourcedDraft:
        """Draft allowed tokens: forced ones, and proposals where the grammar has a choice."""
        proposed: dict[int, str] = {}

        def propose(draft: list[int]) -> int | None:
            index = len(draft)
            if index < len(model_drafts) and list(model_drafts[:index]) == draft:
                proposed[index] = _source(model_name, index)
                return model_drafts[index]
            tokens, matched = self.ngrams.propose(1, draft)
            proposed[index] = _source(_LOOKUP, matched)
            return tokens[0] if tokens else None

        tokens, forced = constraint.look_ahead(count, propose)
        sources = [
            _FORCED if is_forced else proposed[index] for index, is_forced in enumerate(forced)
        ]
        return _SourcedDraft(tokens, sources)

    def record_results(
        self, results: Ordered[SampledToken | InvalidLogits], verified: int
    ) -> list[DraftOutcome]:
        """Learn from the sampled tokens; return the outcomes of the first `verified` drafts."""
        outcomes: list[DraftOutcome] = []
        failed = False
        for index, source in enumerate(self._sources):
            result = results[index] if index < len(results) else None
            matches = isinstance(result, SampledToken) and result.token == self._tokens[index]
            if result is not None and not failed:
                self.acceptance.record(source, matches)
            failed = failed or not matches
            if index < verified:
                outcomes.append(DraftOutcome(source.partition(" ")[0], not failed))
        self._tokens = self._sources = ()
        return outcomes


@dataclass(slots=True)
class DraftCounts:
    """The verified drafts of one kind of source."""

    drafted: int = 0
    accepted: int = 0


class _Drafting(NamedTuple):
    sequence: Sequence
    drafter: Drafter


@dataclass(slots=True)
class Speculation:
    """The drafters of an engine, and the measurements of their costs and successes."""

    draft_tokens_max: int
    rows_max: int
    model: DraftModel | None = None
    costs: StepCosts = field(default_factory=StepCosts)
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    counts_by_kind: dict[str, DraftCounts] = field(default_factory=dict)
    _recent_drafted: float = 0.0
    _recent_accepted: float = 0.0
    _steps_without_model: int = 0

    def __post_init__(self) -> None:
        kinds = [_LOOKUP, _FORCED] + ([self.model.traits.name] if self.model else [])
        self.counts_by_kind = {kind: DraftCounts() for kind in kinds}

    @property
    def drafted_tokens_total(self) -> int:
        """The number of verified drafts."""
        return sum(counts.drafted for counts in self.counts_by_kind.values())

    @property
    def accepted_tokens_total(self) -> int:
        """The number of accepted drafts."""
        return sum(counts.accepted for counts in self.counts_by_kind.values())

    @property
    def recent_acceptance(self) -> float:
        """The accepted share of recently verified drafts; 0 if there are none."""
        drafted = self._recent_drafted
        return round(self._recent_accepted / drafted, 3) if drafted > 0.5 else 0.0

    def counts(self) -> dict[str, float]:
        """Return the metrics of each kind of source."""
        metrics: dict[str, float] = {}
        for kind, counts in self.counts_by_kind.items():
            metrics[f"drafted_by_{kind}_tokens_total"] = counts.drafted
            metrics[f"accepted_by_{kind}_tokens_total"] = counts.accepted
        return metrics

    def drafter(
        self, constraint: Constraint | None = None, predicted: Ordered[int] = ()
    ) -> Drafter:
        """Return the drafter of a new sequence, whose output should resemble `predicted`."""
        return Drafter(NgramProposer(predicted), AcceptanceRates(self.acceptance), constraint)

    def draft(
        self,
        decoding: Ordered[tuple[Sequence, Drafter | None]],
        reserve: Callable[[Sequence, int], int],
        read_tokens: int,
    ) -> None:
        """Set the drafts of each decoding sequence that pay off in the next step.

        `reserve` gives a sequence KV blocks for a number of drafts and returns for how many it
        could. A draft model prefills at most about `read_tokens` tokens of pending text.
        """
        if not self._may_pay_off(len(decoding)):
            return
        drafting = [
            _Drafting(sequence, drafter) for sequence, drafter in decoding if drafter is not None
        ]
        proposals = [
            drafter.propose(sequence, min(self.draft_tokens_max, sequence.remaining_tokens - 1))
            for sequence, drafter in drafting
        ]
        if self.model is not None:
            self._draft_with_model(
                self.model, drafting, proposals, len(decoding), reserve, read_tokens
            )
        lengths = choose_draft_lengths(proposals, len(decoding), self.rows_max, self.costs.seconds)
        for (sequence, _), proposal, length in zip(drafting, proposals, lengths, strict=True):
            sequence.drafts = proposal.tokens[:length]

    def record_step(self, rows: int, seconds: float, *, decodes_only: bool) -> None:
        """Learn the time of a step, without what the draft model took of it."""
        spent_s = self.model.take_spent_s() if self.model is not None else 0.0
        # A step cannot take no time: its rate would be infinite.
        if rows and decodes_only and seconds > spent_s:
            self.costs.record(rows, seconds - spent_s)

    def record_results(
        self, drafter: Drafter, results: Ordered[SampledToken | InvalidLogits], verified: int
    ) -> None:
        """Learn from the tokens sampled for one sequence, of whose drafts `verified` were run."""
        outcomes = drafter.record_results(results, verified)
        for outcome in outcomes:
            counts = self.counts_by_kind[outcome.kind]
            counts.drafted += 1
            counts.accepted += outcome.accepted
        if outcomes:
            accepted = sum(outcome.accepted for outcome in outcomes)
            self._recent_drafted = self._recent_drafted * _DECAY_PER_STEP + len(outcomes)
            self._recent_accepted = self._recent_accepted * _DECAY_PER_STEP + accepted

    def _draft_with_model(
        self,
        model: DraftModel,
        drafting: Ordered[_Drafting],
        proposals: list[DraftProposal],
        rows: int,
        reserve: Callable[[Sequence, int], int],
        read_tokens: int,
    ) -> None:
        """Replace the proposals that are worth less than drafts of the model."""
        name = model.traits.name
        positions = range(self.draft_tokens_max)
        chances = [self.acceptance.chance(_source(name, index)) for index in positions]
        pass_share = self._pass_s(max(len(proposals), 1)) / self.costs.seconds(rows)
        gain = best_expected_gain(chances, pass_share)
        weak = [index for index, proposal in enumerate(proposals) if sum(proposal.chances) <= gain]
        length = self._model_draft_length(chances, len(weak), rows)
        reserved: dict[int, int] = {}
        for index in weak:
            # A draft ends with the answer, its KV blocks and the draft model's context.
            sequence = drafting[index].sequence
            wanted = min(length, sequence.remaining_tokens - 1)
            if wanted > 0 and len(sequence.tokens) + wanted <= model.context_tokens:
                reserved[index] = reserve(sequence, wanted)
        # All sequences of a pass draft the same number of tokens.
        length = max(reserved.values(), default=0)
        chosen = [index for index in weak if length and reserved.get(index) == length]
        targets = [
            drafting[index].drafter.target(model, drafting[index].sequence) for index in chosen
        ]
        drafted = model.draft(targets, length, read_tokens)
        if chosen and not any(drafted):
            # The model is still reading a long prompt: the trial goes on until it has drafted.
            self._steps_without_model = 0
        for index, tokens in zip(chosen, drafted, strict=True):
            sequence, drafter = drafting[index]
            if tokens:
                count = min(self.draft_tokens_max, sequence.remaining_tokens - 1)
                proposals[index] = drafter.propose(sequence, count, tokens, name)

    def _model_draft_length(self, chances: Ordered[float], drafting: int, rows: int) -> int:
        """Return how many tokens the model drafts for `drafting` of `rows`; 0 if that is slower."""
        if not drafting:
            return 0
        pass_s, seconds = self._pass_s(drafting), self.costs.seconds
        length = choose_model_draft_length(chances, drafting, rows, self.rows_max, seconds, pass_s)
        if length == 0:
            # The first trial is immediate: it measures the cost of a pass.
            is_trial = self._steps_without_model % _TRIAL_INTERVAL_STEPS == 0
            self._steps_without_model += 1
            return min(_TRIAL_LENGTH, len(chances)) if is_trial else 0
        return length

    def _pass_s(self, rows: int) -> float:
        """Return the measured or assumed time of one pass of the draft model."""
        assert self.model is not None
        if self.model.costs.known:
            return self.model.costs.seconds(rows)
        return self.model.cost_share * self.costs.seconds(rows)

    def _may_pay_off(self, rows: int) -> bool:
        """Return whether even a draft that is certainly accepted is worth its row."""
        certain = DraftProposal((0,), (1.0,))
        return choose_draft_lengths([certain], rows, self.rows_max, self.costs.seconds) == [1]


def _source(kind: str, position: int) -> str:
    """Return the name under which the acceptance of a draft is learned."""
    return f"{kind} {position}"
