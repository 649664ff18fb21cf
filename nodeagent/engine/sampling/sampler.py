"""From logits to one token for each sequence, in the order the field applies its knobs.

Penalties and bias change logits; then temperature; then top_k, top_p, min_p cut the tail; then one
draw from the sequence's own generator, so that a seed draws the same numbers in any company. A
constraint forbids after the knobs and before the cuts, so that top_k counts allowed tokens only.
Log-probabilities told to the caller are those of the model itself, before any knob.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.structured.constraint import Constraint, ConstraintError

_TOP_FIRST: Final = 256
"""Looked for first: they take most of the probability, and most cuts leave no more."""

_DRAWN_TOGETHER: Final = 64
"""Sorting takes some twenty bytes for each token of the vocabulary and each row."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The knobs of one request. Temperature 0 means the likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Tokens of the answer before which nothing may end it."""
    drawn_before: int = 0
    """Tokens of this answer that another engine drew: a seed's numbers for them are used up."""
    logprobs: int | None = None
    """How many alternatives to tell beside the sampled token; None for no log-probabilities."""

    @property
    def plain(self) -> bool:
        """True where the likeliest token is the answer and nothing else is asked."""
        return (
            self.temperature == 0
            and self.logprobs is None
            and not self.logit_bias
            and not self.penalised
        )

    @property
    def cuts(self) -> bool:
        """True where unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """True where earlier tokens change the logits."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, with log-probabilities where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class InvalidLogits(ArithmeticError):
    """No token can be sampled for this sequence; the message says why."""


@dataclass(slots=True)
class Sampler:
    """One sequence's knobs and the state they need: its generator and what it has said."""

    params: SamplingParams
    prompt: list[int]
    constraint: Constraint | None = None
    ends: frozenset[int] = frozenset()
    """Tokens that end the sequence."""
    _generator: torch.Generator | None = None
    _drawn: int = 0
    _counts: dict[int, int] = field(default_factory=dict)
    _prompt_ids: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where the likeliest token is the answer and nothing else is asked."""
        return self.params.plain and self.constraint is None and not self._early

    @property
    def draws_only(self) -> bool:
        """True where one draw from the model's own logits is all that is asked."""
        params = self.params
        asked = params.logprobs is not None or params.logit_bias or params.penalised
        free = self.constraint is None and not self._early
        return params.temperature > 0 and not asked and free

    @property
    def _early(self) -> bool:
        """True where the next token may not end the sequence."""
        return self.params.drawn_before + self._drawn < self.params.min_tokens

    def sample(self, logits: Tensor) -> SampledToken:
        """Choose from `logits` [vocabulary], which may be changed, or raise BrokenConstraint."""
        params = self.params
        logprobs = logits.log_softmax(-1) if params.logprobs is not None else None
        self._adjust(logits)
        token = (
            int(most_likely(logits[None]))
            if params.temperature == 0
            else draw_tokens(logits[None], [self])[0]
        )
        if self.constraint is not None:
            self.constraint.accept(token)
        self._drawn += 1
        if params.penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        if logprobs is None:
            return SampledToken(token)
        best = logprobs.topk(min(params.logprobs or 0, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)

    def _adjust(self, logits: Tensor) -> None:
        params = self.params
        if params.penalised:
            self._penalise(logits)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(values, device=logits.device)
        if self._early:
            logits[list(self.ends)] = -torch.inf
        if self.constraint is not None:
            self.constraint.apply(logits)

    def _penalise(self, logits: Tensor) -> None:
        params = self.params
        device = logits.device
        ids = torch.tensor(list(self._counts), dtype=torch.int64, device=device)
        if params.repetition_penalty != 1.0:
            # This knob alone counts the prompt too, as it does elsewhere.
            if self._prompt_ids is None:
                self._prompt_ids = torch.tensor(sorted(set(self.prompt)), device=device)
            seen = torch.unique(torch.cat((self._prompt_ids, ids)))
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = torch.tensor(list(self._counts.values()), device=device)
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty

    def point(self) -> float:
        """Return where in its probabilities this sequence draws next, from nought to one."""
        if self._generator is None:
            # On the CPU on every device: a seed then means the same everywhere.
            self._generator = torch.Generator("cpu")
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
                for _ in range(self.params.drawn_before):
                    # One by one, as they were drawn: many at once come in another order.
                    torch.rand((), generator=self._generator, dtype=torch.float64)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def draw_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Draw from each row of `logits` for one of `samplers`, in the order of their probabilities."""
    params = [sampler.params for sampler in samplers]
    heated = logits / _column([one.temperature for one in params], logits)
    points = _column([sampler.point() for sampler in samplers], logits, torch.float64)
    return _draw_sorted(heated.softmax(-1), params, points, _TOP_FIRST)


def _draw_sorted(
    probabilities: Tensor, params: Sequence[SamplingParams], points: Tensor, count: int
) -> list[int]:
    """Draw from the `count` likeliest of each row, and from the whole of those that need more.

    Most draws and cuts end among the first few hundred, and to sort all takes ten times as long.
    """
    whole = count >= probabilities.shape[-1]
    best, order = (
        probabilities.sort(descending=True, stable=True) if whole else probabilities.topk(count)
    )
    keep = _kept(best, params, whole)
    cumulative = best.double().cumsum(-1)
    index = torch.searchsorted(cumulative, points * _sum_of(keep, cumulative, whole))
    tokens = order.gather(-1, index.minimum(keep - 1))
    if not whole:
        cut = _column([one.cuts for one in params], best, torch.bool)
        tokens[(index >= keep) | (cut & (keep == count))] = -1
    drawn: list[int] = tokens[:, 0].tolist()
    rest = [row for row, token in enumerate(drawn) if token < 0]
    if rest:
        more = _draw_sorted(
            probabilities[rest],
            [params[row] for row in rest],
            points[rest],
            probabilities.shape[-1],
        )
        for row, token in zip(rest, more, strict=True):
            drawn[row] = token
    return drawn


def _kept(best: Tensor, params: Sequence[SamplingParams], whole: bool) -> Tensor:
    """How many of each row's sorted probabilities remain after top_k, top_p and min_p: [n, 1]."""
    most = best.shape[-1]
    top_k = [min(one.top_k, most) if one.top_k > 0 else most for one in params]
    keep = _column(top_k, best, torch.int64)
    places = torch.arange(most, device=best.device)
    if any(one.top_p < 1.0 for one in params):
        top_p, sums = _column([one.top_p for one in params], best), best.cumsum(-1)
        below = (sums < top_p * _sum_of(keep, sums, whole)) & (places < keep)
        reached = below.sum(-1, keepdim=True) + 1
        keep = torch.where(top_p < 1.0, keep.minimum(reached), keep)
    if any(one.min_p > 0.0 for one in params):
        floor = _column([one.min_p for one in params], best) * best[:, :1]
        above = (best >= floor) & (places < keep)
        keep = keep.minimum(above.sum(-1, keepdim=True).clamp_min(1))
    return keep


def _sum_of(keep: Tensor, sums: Tensor, whole: bool) -> Tensor:
    """Return what the first `keep` of each row come to: with all that `sums` leave out, one."""
    kept = sums.gather(-1, keep - 1)
    return kept if whole else torch.where(keep < sums.shape[-1], kept, 1.0)


def _column(values: Sequence[float], beside: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a value for each row, on the device of `beside`: [n, 1]."""
    return torch.tensor(values, dtype=dtype).to(beside.device, non_blocking=True)[:, None]


def most_likely(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row: the first that is nan, where one is."""
    if logits.device.type == "cpu":
        # torch reads at a third of memory's speed, and where a processor is busy elsewhere its
        # threads wait for one another for longer than numpy's one thread takes.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class SamplingRun:
    """A sequence whose next token is due, and the drafts that this step computed for it."""

    sampler: Sampler
    drafts: tuple[int, ...] = ()


@torch.inference_mode()
def sample_step(
    logits: Tensor, dues: Sequence[SamplingRun]
) -> list[list[SampledToken | InvalidLogits]]:
    """Sample for each of `dues`, whose rows follow one another: one for each draft, and one more.

    Each answer goes on as long as what was sampled is what was drafted, so that the row of a draft
    counts only where the draft held. An unsound row harms no other.
    """
    best = most_likely(logits)
    sound = logits.gather(-1, best[:, None])[:, 0].isfinite().tolist()
    tokens = best.tolist()
    drawn = _draw_together(logits, dues, sound)
    answers: list[list[SampledToken | InvalidLogits]] = []
    row = 0
    for due in dues:
        run: list[SampledToken | InvalidLogits] = []
        for ahead, draft in enumerate((*due.drafts, None)):
            at = row + ahead
            result: SampledToken | InvalidLogits
            if not sound[at]:
                result = InvalidLogits("cannot sample: the model gave no finite logits")
            elif due.sampler.plain:
                result = SampledToken(tokens[at])
            elif at in drawn:
                result = SampledToken(drawn[at])
            else:
                result = _sample(due.sampler, logits[at])
            run.append(result)
            if isinstance(result, InvalidLogits) or result.token != draft:
                break
        answers.append(run)
        row += len(due.drafts) + 1
    return answers


def _draw_together(
    logits: Tensor, dues: Sequence[SamplingRun], sound: Sequence[bool]
) -> dict[int, int]:
    """Draw for whoever has no drafts, and asks for no more than a draw: row by row, the tokens."""
    rows: list[int] = []
    samplers: list[Sampler] = []
    at = 0
    for due in dues:
        if not due.drafts and sound[at] and due.sampler.draws_only:
            rows.append(at)
            samplers.append(due.sampler)
        at += len(due.drafts) + 1
    tokens: list[int] = []
    for start in range(0, len(rows), _DRAWN_TOGETHER):
        end = start + _DRAWN_TOGETHER
        part = logits if len(rows) == len(logits) <= _DRAWN_TOGETHER else logits[rows[start:end]]
        tokens += draw_tokens(part, samplers[start:end])
    return dict(zip(rows, tokens, strict=True))


def _sample(sampler: Sampler, logits: Tensor) -> SampledToken | InvalidLogits:
    try:
        return sampler.sample(logits)
    except ConstraintError as error:
        return InvalidLogits(str(error))
