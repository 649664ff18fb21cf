"""From logits to one token for each sequence, in the order the field applies its knobs.

Penalties and bias change logits; then temperature; then top_k, top_p, min_p cut the tail; then one
draw from the sequence's own generator, so that a seed gives the same output in any company. A
constraint forbids after the knobs and before the cuts, so that top_k counts allowed tokens only.
Log-probabilities told to the caller are those of the model itself, before any knob.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.constrain.constraint import BrokenConstraint, Constraint

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
    def penalised(self) -> bool:
        """True where earlier tokens change the logits."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token, with log-probabilities where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class UnsoundLogits(ArithmeticError):
    """No token can be sampled for this sequence; the message says why."""


@dataclass(slots=True)
class Sampler:
    """One sequence's knobs and the state they need: its generator and what it has said."""

    params: SamplingParams
    prompt: list[int]
    constraint: Constraint | None = None
    _generator: torch.Generator | None = None
    _counts: dict[int, int] = field(default_factory=dict)
    _prompt_ids: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where the likeliest token is the answer and nothing else is asked."""
        return self.params.plain and self.constraint is None

    @property
    def draws_only(self) -> bool:
        """True where one draw from the model's own logits is all that is asked."""
        params = self.params
        asked = params.logprobs is not None or params.logit_bias or params.penalised
        return params.temperature > 0 and not asked and self.constraint is None

    def sample(self, logits: Tensor) -> Sampled:
        """Choose from `logits` [vocabulary], which may be changed, or raise BrokenConstraint."""
        params = self.params
        logprobs = logits.log_softmax(-1) if params.logprobs is not None else None
        self._adjust(logits)
        token = (
            int(likeliest(logits[None]))
            if params.temperature == 0
            else draw(logits[None], [self])[0]
        )
        if self.constraint is not None:
            self.constraint.accept(token)
        if params.penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        if logprobs is None:
            return Sampled(token)
        best = logprobs.topk(min(params.logprobs or 0, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Sampled(token, float(logprobs[token]), top)

    def _adjust(self, logits: Tensor) -> None:
        params = self.params
        if params.penalised:
            self._penalise(logits)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(values, device=logits.device)
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


def draw(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Draw from each row of `logits` for one of `samplers`; the device is waited for once."""
    params = [sampler.params for sampler in samplers]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)[:, None]

    heated = logits / column([one.temperature for one in params])
    probabilities, order = heated.softmax(-1).sort(descending=True, stable=True)
    last = _kept(probabilities, params, column) - 1
    cumulative = probabilities.double().cumsum(-1)
    points = column([sampler.point() for sampler in samplers], torch.float64)
    index = torch.searchsorted(cumulative, points * cumulative.gather(-1, last))
    tokens: list[int] = order.gather(-1, index.minimum(last))[:, 0].tolist()
    return tokens


def _kept(
    probabilities: Tensor, params: Sequence[SamplingParams], column: Callable[..., Tensor]
) -> Tensor:
    """How many of each row's sorted `probabilities` remain after top_k, top_p and min_p: [n, 1]."""
    most = probabilities.shape[-1]
    keep = column([min(one.top_k, most) if one.top_k > 0 else most for one in params], torch.int64)
    places = torch.arange(most, device=probabilities.device)
    if any(one.top_p < 1.0 for one in params):
        top_p, sums = column([one.top_p for one in params]), probabilities.cumsum(-1)
        below = (sums < top_p * sums.gather(-1, keep - 1)) & (places < keep)
        reached = below.sum(-1, keepdim=True) + 1
        keep = torch.where(top_p < 1.0, keep.minimum(reached), keep)
    if any(one.min_p > 0.0 for one in params):
        floor = column([one.min_p for one in params]) * probabilities[:, :1]
        above = (probabilities >= floor) & (places < keep)
        keep = keep.minimum(above.sum(-1, keepdim=True).clamp_min(1))
    return keep


def likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row: the first that is nan, where one is."""
    if logits.device.type == "cpu":
        # torch reads at a third of memory's speed, and where a processor is busy elsewhere its
        # threads wait for one another for longer than numpy's one thread takes.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class Due:
    """A sequence whose next token is due, and the drafts that this step computed for it."""

    sampler: Sampler
    drafts: tuple[int, ...] = ()


@torch.inference_mode()
def sample_runs(logits: Tensor, dues: Sequence[Due]) -> list[list[Sampled | UnsoundLogits]]:
    """Sample for each of `dues`, whose rows follow one another: one for each draft, and one more.

    Each answer goes on as long as what was sampled is what was drafted, so that the row of a draft
    counts only where the draft held. An unsound row harms no other.
    """
    best = likeliest(logits)
    sound = logits.gather(-1, best[:, None])[:, 0].isfinite().tolist()
    tokens = best.tolist()
    drawn = _draw_together(logits, dues, sound)
    answers: list[list[Sampled | UnsoundLogits]] = []
    row = 0
    for due in dues:
        run: list[Sampled | UnsoundLogits] = []
        for ahead, draft in enumerate((*due.drafts, None)):
            at = row + ahead
            result: Sampled | UnsoundLogits
            if not sound[at]:
                result = UnsoundLogits("cannot sample: the model gave no finite logits")
            elif due.sampler.plain:
                result = Sampled(tokens[at])
            elif at in drawn:
                result = Sampled(drawn[at])
            else:
                result = _sample(due.sampler, logits[at])
            run.append(result)
            if isinstance(result, UnsoundLogits) or result.token != draft:
                break
        answers.append(run)
        row += len(due.drafts) + 1
    return answers


def _draw_together(logits: Tensor, dues: Sequence[Due], sound: Sequence[bool]) -> dict[int, int]:
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
        tokens += draw(part, samplers[start:end])
    return dict(zip(rows, tokens, strict=True))


def _sample(sampler: Sampler, logits: Tensor) -> Sampled | UnsoundLogits:
    try:
        return sampler.sample(logits)
    except BrokenConstraint as error:
        return UnsoundLogits(str(error))
