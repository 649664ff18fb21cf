"""Drafts for every decoding sequence of a step, and what became of them.

Three drafters, one way: what came before (`decide.lookup`), a grammar that leaves one choice, and a
model that runs ahead (`ahead`) where the engine was given one.

Rule 1: lossless. A step samples at each drafted position as it would have without drafts, and goes
on only while the sample equals the draft. As a draft is one certain token, this is rejection
sampling: the draft is kept with the model's own probability, and what replaces it is drawn from the
rest. The same draws are made from the same generator, so even a seeded output stays what it was.
Rule 2: the grammar of a constrained sequence drafts too: where it leaves one choice, that is the
draft, and no draft that it forbids is verified.
Rule 3: drafts that are not verified are still compared with what came, so that a source that was
turned off for failing is turned on again when it would hold.
Rule 4: a model drafts where its passes pay. While they do not, it is tried now and then.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.sampling.sampler import Sampled, UnsoundLogits
from nodeagent.engine.scheduler.sequence import Sequence
from nodeagent.engine.speculative.draft_length import (
    Acceptance,
    Offer,
    StepCosts,
    choose_ahead,
    choose_depths,
    promise,
)
from nodeagent.engine.speculative.draft_model import Ahead, Shadow
from nodeagent.engine.speculative.ngram import Lookup
from nodeagent.engine.structured.constraint import Constraint

_FORCED: Final = "forced"
_LOOKUP: Final = "lookup"
_KEPT_PER_STEP: Final = 0.95
_TRIED_EVERY: Final = 64
"""Steps between two tries of a model whose drafts do not pay."""
_TRIED_DEPTH: Final = 2


@dataclass(slots=True)
class Drafter:
    """One sequence's drafts: where they come from and how they fare."""

    lookup: Lookup
    acceptance: Acceptance
    constraint: Constraint | None = None
    shadow: Shadow | None = None
    """The sequence as the model that drafts has read it; None before it did."""
    _offered: tuple[int, ...] = ()
    _sources: tuple[str, ...] = ()

    def offer(
        self, sequence: Sequence, count: int, ahead: Ordered[int] = (), name: str = ""
    ) -> Offer:
        """Draft up to `count` tokens: `ahead`, by the model of this `name`, or others."""
        if count < 1:
            return Offer((), ())
        self.lookup.follow(sequence.tokens)
        if self.constraint is not None:
            tokens, sources = self._by_grammar(self.constraint, count, ahead, name)
        elif ahead:
            tokens, sources = list(ahead), [f"{name} {at}" for at in range(len(ahead))]
        else:
            tokens, matched = self.lookup.propose(count)
            sources = [f"{_LOOKUP} {matched}"] * len(tokens)
        self._offered, self._sources = tuple(tokens), tuple(sources)
        chance, chances = 1.0, []
        for source in sources:
            chance *= self.acceptance.chance(source)
            chances.append(chance)
        return Offer(self._offered, tuple(chances))

    def follow(self, ahead: Ahead, sequence: Sequence) -> Shadow:
        """Return the sequence's shadow, made when it is first needed."""
        if self.shadow is None:
            self.shadow = ahead.shadow(sequence)
        return self.shadow

    def _by_grammar(
        self, constraint: Constraint, count: int, ahead: Ordered[int], name: str
    ) -> tuple[list[int], list[str]]:
        found: dict[int, str] = {}

        def propose(draft: list[int]) -> int | None:
            at = len(draft)
            if at < len(ahead) and list(ahead[:at]) == draft:
                found[at] = f"{name} {at}"
                return ahead[at]
            tokens, matched = self.lookup.propose(1, draft)
            found[at] = f"{_LOOKUP} {matched}"
            return tokens[0] if tokens else None

        tokens, must = constraint.look_ahead(count, propose)
        return tokens, [_FORCED if must[at] else found[at] for at in range(len(tokens))]

    def settle(
        self, results: Ordered[Sampled | UnsoundLogits], verified: int
    ) -> list[tuple[str, bool]]:
        """Learn from what came; return the source and the fate of each draft that was verified."""
        fates: list[tuple[str, bool]] = []
        failed = False
        for index, source in enumerate(self._sources):
            result = results[index] if index < len(results) else None
            held = isinstance(result, Sampled) and result.token == self._offered[index]
            if result is not None and not failed:
                self.acceptance.note(source, held)
            failed = failed or not held
            if index < verified:
                fates.append((source.partition(" ")[0], not failed))
        self._offered = self._sources = ()
        return fates


@dataclass(slots=True)
class Tally:
    """Drafts of one kind of source."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Speculation:
    """What an engine speculates with."""

    draft_tokens_max: int
    rows_max: int
    ahead: Ahead | None = None
    costs: StepCosts = field(default_factory=StepCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tallies: dict[str, Tally] = field(default_factory=dict)
    _recent_drafted: float = 0.0
    _recent_accepted: float = 0.0
    _silent_steps: int = 0

    def __post_init__(self) -> None:
        kinds = [_LOOKUP, _FORCED] + ([self.ahead.habits.name] if self.ahead else [])
        self.tallies = {kind: Tally() for kind in kinds}

    @property
    def drafted_tokens_total(self) -> int:
        """Drafts that were verified."""
        return sum(tally.drafted for tally in self.tallies.values())

    @property
    def accepted_tokens_total(self) -> int:
        """Drafts that held."""
        return sum(tally.accepted for tally in self.tallies.values())

    @property
    def recent_acceptance(self) -> float:
        """Share of recently verified drafts that held; 0 where none were."""
        drafted = self._recent_drafted
        return round(self._recent_accepted / drafted, 3) if drafted > 0.5 else 0.0

    def counts(self) -> dict[str, float]:
        """Return what the metrics tell of each drafter."""
        found: dict[str, float] = {}
        for kind, tally in self.tallies.items():
            found[f"drafted_by_{kind}_tokens_total"] = tally.drafted
            found[f"accepted_by_{kind}_tokens_total"] = tally.accepted
        return found

    def drafter(
        self, constraint: Constraint | None = None, predicted: Ordered[int] = ()
    ) -> Drafter:
        """Return a new sequence's drafter."""
        return Drafter(Lookup(predicted), Acceptance(self.acceptance), constraint)

    def draft(
        self,
        decoding: Ordered[tuple[Sequence, Drafter | None]],
        make_room: Callable[[Sequence, int], int],
        read_tokens: int,
    ) -> None:
        """Give each decoding sequence the drafts that pay in this step.

        A model that drafts reads at most about `read_tokens` of what it has not read yet.
        """
        if not self._may_pay(len(decoding)):
            return
        drafters = [(sequence, drafter) for sequence, drafter in decoding if drafter is not None]
        offers = [
            drafter.offer(sequence, min(self.draft_tokens_max, sequence.remaining - 1))
            for sequence, drafter in drafters
        ]
        if self.ahead is not None:
            self._run_ahead(self.ahead, drafters, offers, len(decoding), make_room, read_tokens)
        depths = choose_depths(offers, len(decoding), self.rows_max, self.costs.seconds)
        for (sequence, _), offer, depth in zip(drafters, offers, depths, strict=True):
            sequence.drafts = offer.tokens[:depth]

    def timed(self, rows: int, seconds: float, *, decodes_only: bool) -> None:
        """Learn what a step of so many rows took."""
        spent_s = self.ahead.take_spent_s() if self.ahead is not None else 0.0
        if rows and decodes_only:
            self.costs.note(rows, max(seconds - spent_s, 0.0))

    def _run_ahead(
        self,
        ahead: Ahead,
        drafters: Ordered[tuple[Sequence, Drafter]],
        offers: list[Offer],
        rows: int,
        make_room: Callable[[Sequence, int], int],
        read_tokens: int,
    ) -> None:
        """Have the model draft for whom nothing better was found, as deep as that pays."""
        name = ahead.habits.name
        chances = [self.acceptance.chance(f"{name} {at}") for at in range(self.draft_tokens_max)]
        worth = promise(chances, self._pass_s(max(len(offers), 1)) / self.costs.seconds(rows))
        asked = [at for at, offer in enumerate(offers) if sum(offer.chances) <= worth]
        depth = self._depth_ahead(chances, len(asked), rows)
        room: dict[int, int] = {}
        for at in asked:
            # Nobody drafts past the end of its answer, its blocks, or what the model can read.
            sequence, _ = drafters[at]
            wanted = min(depth, sequence.remaining - 1)
            if wanted > 0 and len(sequence.tokens) + wanted <= ahead.context_tokens:
                room[at] = make_room(sequence, wanted)
        depth = max(room.values(), default=0)
        asked = [at for at in asked if depth and room.get(at) == depth]
        pairs = [
            (sequence, drafter.follow(ahead, sequence))
            for sequence, drafter in (drafters[at] for at in asked)
        ]
        drafted = ahead.draft(pairs, depth, read_tokens)
        if asked and not any(drafted):
            # Still reading a long prompt: a try ends when something was drafted.
            self._silent_steps = 0
        for at, tokens in zip(asked, drafted, strict=True):
            sequence, drafter = drafters[at]
            if tokens:
                count = min(self.draft_tokens_max, sequence.remaining - 1)
                offers[at] = drafter.offer(sequence, count, tokens, name)

    def _depth_ahead(self, chances: Ordered[float], drafting: int, rows: int) -> int:
        """Return how deep the model drafts for so many of `rows`; 0 where that does not pay."""
        if not drafting:
            return 0
        pass_s, seconds = self._pass_s(drafting), self.costs.seconds
        depth = choose_ahead(chances, drafting, rows, self.rows_max, seconds, pass_s)
        if depth == 0:
            # The first try is at once: then it is known what a pass takes.
            tried = self._silent_steps % _TRIED_EVERY == 0
            self._silent_steps += 1
            return min(_TRIED_DEPTH, len(chances)) if tried else 0
        return depth

    def _pass_s(self, rows: int) -> float:
        """Return what one pass of the model that drafts takes."""
        assert self.ahead is not None
        if self.ahead.costs.known:
            return self.ahead.costs.seconds(rows)
        return self.ahead.share * self.costs.seconds(rows)

    def _may_pay(self, rows: int) -> bool:
        """Say whether even a draft that is sure to hold is worth its row."""
        sure = Offer((0,), (1.0,))
        return choose_depths([sure], rows, self.rows_max, self.costs.seconds) == [1]

    def settle(
        self, drafter: Drafter, results: Ordered[Sampled | UnsoundLogits], verified: int
    ) -> None:
        """Note what became of one sequence's drafts."""
        fates = drafter.settle(results, verified)
        for kind, held in fates:
            tally = self.tallies[kind]
            tally.drafted += 1
            tally.accepted += held
        if fates:
            accepted = sum(held for _, held in fates)
            self._recent_drafted = self._recent_drafted * _KEPT_PER_STEP + len(fates)
            self._recent_accepted = self._recent_accepted * _KEPT_PER_STEP + accepted
