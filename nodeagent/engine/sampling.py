"""From logits to one token for each sequence, in the order the field applies its knobs.

Penalties and bias change logits; then temperature; then top_k, top_p, min_p cut the tail; then one
draw from the sequence's own generator, so that a seed gives the same output in any company. A
constraint forbids after the knobs and before the cuts, so that top_k counts allowed tokens only.
Log-probabilities told to the caller are those of the model itself, before any knob.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nodeagent.engine.constrain.constraint import BrokenConstraint, Constraint


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

    def sample(self, logits: Tensor) -> Sampled:
        """Choose from `logits` [vocabulary], which may be changed, or raise BrokenConstraint."""
        params = self.params
        logprobs = logits.log_softmax(-1) if params.logprobs is not None else None
        self._adjust(logits)
        token = int(logits.argmax()) if params.temperature == 0 else self._draw(logits)
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

    def _draw(self, logits: Tensor) -> int:
        params = self.params
        if self._generator is None:
            # On the CPU on every device: a seed then means the same everywhere.
            self._generator = torch.Generator("cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
                for _ in range(params.drawn_before):
                    # One by one, as they were drawn: many at once come in another order.
                    torch.rand((), generator=self._generator, dtype=torch.float64)
        probabilities, order = (
            (logits / params.temperature).softmax(-1).sort(descending=True, stable=True)
        )
        keep = self._kept(probabilities)
        cumulative = probabilities[:keep].double().cumsum(0)
        point = torch.rand((), generator=self._generator, dtype=torch.float64)
        index = torch.searchsorted(cumulative, (point * cumulative[-1].cpu()).to(logits.device))
        return int(order[min(int(index), keep - 1)])

    def _kept(self, probabilities: Tensor) -> int:
        """How many of the sorted `probabilities` remain after top_k, top_p and min_p."""
        params = self.params
        keep = params.top_k if params.top_k > 0 else len(probabilities)
        keep = min(keep, len(probabilities))
        if params.top_p < 1.0:
            head = probabilities[:keep]
            cumulative = head.cumsum(0)
            reached = int((cumulative < params.top_p * cumulative[-1]).sum()) + 1
            keep = min(keep, reached)
        if params.min_p > 0.0:
            floor = params.min_p * probabilities[0]
            keep = min(keep, max(1, int((probabilities[:keep] >= floor).sum())))
        return keep


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
    best, likeliest = logits.max(-1)
    sound = best.isfinite().tolist()
    tokens = likeliest.tolist()
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
            else:
                result = _sample(due.sampler, logits[at])
            run.append(result)
            if isinstance(result, UnsoundLogits) or result.token != draft:
                break
        answers.append(run)
        row += len(due.drafts) + 1
    return answers


def sample_rows(logits: Tensor, samplers: list[Sampler]) -> list[Sampled | UnsoundLogits]:
    """Sample each row of `logits` by its own sampler; an unsound row harms no other."""
    return [run[0] for run in sample_runs(logits, [Due(sampler) for sampler in samplers])]


def _sample(sampler: Sampler, logits: Tensor) -> Sampled | UnsoundLogits:
    try:
        return sampler.sample(logits)
    except BrokenConstraint as error:
        return UnsoundLogits(str(error))
