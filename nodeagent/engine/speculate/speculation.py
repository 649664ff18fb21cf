"""Drafts for every decoding sequence of a step, and what became of them.

Rule 1: lossless. A step samples at each drafted position as it would have without drafts, and goes
on only while the sample equals the draft. As a draft is one certain token, this is rejection
sampling: the draft is kept with the model's own probability, and what replaces it is drawn from the
rest. The same draws are made from the same generator, so even a seeded output stays what it was.
Rule 2: the grammar of a constrained sequence drafts too: where it leaves one choice, that is the
draft, and no draft that it forbids is verified.
Rule 3: drafts that are not verified are still compared with what came, so that a source that was
turned off for failing is turned on again when it would hold.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.constrain.constraint import Constraint
from nodeagent.engine.decide.depth import Acceptance, Offer, StepCosts, choose_depths
from nodeagent.engine.decide.lookup import Lookup
from nodeagent.engine.decide.sequence import Sequence
from nodeagent.engine.sampling import Sampled, UnsoundLogits

_FORCED: Final = "forced"
_KEPT_PER_STEP: Final = 0.95


@dataclass(slots=True)
class Drafter:
    """One sequence's drafts: where they come from and how they fare."""

    lookup: Lookup
    acceptance: Acceptance
    constraint: Constraint | None = None
    drafted: int = 0
    accepted: int = 0
    _offered: tuple[int, ...] = ()
    _sources: tuple[str, ...] = ()

    def offer(self, sequence: Sequence, count: int) -> Offer:
        """Draft up to `count` tokens."""
        if count < 1:
            return Offer((), ())
        self.lookup.follow(sequence.tokens)
        if self.constraint is None:
            tokens, matched = self.lookup.propose(count)
            sources = [f"match {matched}"] * len(tokens)
        else:
            tokens, sources = self._by_grammar(self.constraint, count)
        self._offered, self._sources = tuple(tokens), tuple(sources)
        chance, chances = 1.0, []
        for source in sources:
            chance *= self.acceptance.chance(source)
            chances.append(chance)
        return Offer(self._offered, tuple(chances))

    def _by_grammar(self, constraint: Constraint, count: int) -> tuple[list[int], list[str]]:
        found: dict[int, str] = {}

        def propose(draft: list[int]) -> int | None:
            tokens, matched = self.lookup.propose(1, draft)
            found[len(draft)] = f"match {matched}"
            return tokens[0] if tokens else None

        tokens, must = constraint.look_ahead(count, propose)
        return tokens, [_FORCED if must[at] else found[at] for at in range(len(tokens))]

    def settle(self, results: Ordered[Sampled | UnsoundLogits], verified: int) -> None:
        """Learn from what came; `verified` of the drafts were computed."""
        for index, result in enumerate(results[: len(self._offered)]):
            held = isinstance(result, Sampled) and result.token == self._offered[index]
            self.acceptance.note(self._sources[index], held)
            self.accepted += held and index < verified
            if not held:
                break
        self.drafted += verified
        self._offered = ()


@dataclass(slots=True)
class Speculation:
    """What an engine speculates with."""

    draft_tokens_max: int
    rows_max: int
    costs: StepCosts = field(default_factory=StepCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    _recent_drafted: float = 0.0
    _recent_accepted: float = 0.0

    @property
    def recent_acceptance(self) -> float:
        """Share of recently verified drafts that held; 0 where none were."""
        drafted = self._recent_drafted
        return round(self._recent_accepted / drafted, 3) if drafted > 0.5 else 0.0

    def drafter(
        self, constraint: Constraint | None = None, predicted: Ordered[int] = ()
    ) -> Drafter:
        """Return a new sequence's drafter."""
        return Drafter(Lookup(predicted), Acceptance(self.acceptance), constraint)

    def draft(self, decoding: Ordered[tuple[Sequence, Drafter | None]]) -> None:
        """Give each decoding sequence the drafts that pay in this step."""
        if not self._may_pay(len(decoding)):
            return
        drafters = [(sequence, drafter) for sequence, drafter in decoding if drafter is not None]
        offers = [
            drafter.offer(sequence, min(self.draft_tokens_max, sequence.remaining - 1))
            for sequence, drafter in drafters
        ]
        depths = choose_depths(offers, len(decoding), self.rows_max, self.costs.seconds)
        for (sequence, _), offer, depth in zip(drafters, offers, depths, strict=True):
            sequence.drafts = offer.tokens[:depth]

    def _may_pay(self, rows: int) -> bool:
        """Say whether even a draft that is sure to hold is worth its row."""
        sure = Offer((0,), (1.0,))
        return choose_depths([sure], rows, self.rows_max, self.costs.seconds) == [1]

    def settle(
        self, drafter: Drafter, results: Ordered[Sampled | UnsoundLogits], verified: int
    ) -> None:
        """Note what became of one sequence's drafts."""
        before = drafter.accepted
        drafter.settle(results, verified)
        accepted = drafter.accepted - before
        self.drafted_tokens_total += verified
        self.accepted_tokens_total += accepted
        if verified:
            self._recent_drafted = self._recent_drafted * _KEPT_PER_STEP + verified
            self._recent_accepted = self._recent_accepted * _KEPT_PER_STEP + accepted
