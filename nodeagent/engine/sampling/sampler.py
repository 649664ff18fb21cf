"""Samples one token for each sequence from its logits.

The order is that of other engines. Penalties and bias change the logits; a constraint forbids
tokens; then temperature; then top_k, top_p and min_p cut the tail, so that top_k counts allowed
tokens only; then one draw from the sequence's own generator, so that a seed gives the same tokens
in any batch. Reported log-probabilities are the model's, before any of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.structured.constraint import Constraint, ConstraintError

_TOP_FIRST: Final = 256
"""Sorted first: they have most of the probability, and most cuts leave no more."""

_DRAW_ROWS_MAX: Final = 64
"""Rows drawn together: sorting takes about 20 bytes for each token of the vocabulary and row."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. Temperature 0 means greedy decoding."""

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
    """The answer may not end before it has this many tokens."""
    drawn_before: int = 0
    """Tokens of this answer that another engine sampled before a failover: the generator of a seed
    skips them."""
    logprobs: int | None = None
    """How many alternatives to report beside the sampled token; None for no log-probabilities."""

    @property
    def is_greedy(self) -> bool:
        """Whether the request is greedy, and needs nothing but the most likely token."""
        return (
            self.temperature == 0
            and self.logprobs is None
            and not self.logit_bias
            and not self.has_penalties
        )

    @property
    def has_cuts(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, with log-probabilities where the request wants them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class InvalidLogits(ArithmeticError):
    """No token can be sampled for a sequence; the message says why."""


class GrammarFailed(InvalidLogits):
    """The request's grammar exceeds a limit after some tokens; its logits are valid."""


@dataclass(slots=True)
class Sampler:
    """The parameters of one sequence, its random generator and its token counts."""

    params: SamplingParams
    prompt: list[int]
    constraint: Constraint | None = None
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the sequence."""
    _generator: torch.Generator | None = None
    _drawn: int = 0
    _counts: dict[int, int] = field(default_factory=dict)
    _prompt_ids: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the most likely one, and nothing else is needed."""
        return self.params.is_greedy and self.constraint is None and not self._may_not_end

    @property
    def is_plain_draw(self) -> bool:
        """Whether one draw from the model's own logits is all that is needed."""
        params = self.params
        needs_more = params.logprobs is not None or params.logit_bias or params.has_penalties
        is_free = self.constraint is None and not self._may_not_end
        return params.temperature > 0 and not needs_more and is_free

    @property
    def _may_not_end(self) -> bool:
        """Whether the next token may not end the sequence."""
        return self._drawn < self.params.min_tokens

    def sample(self, logits: Tensor) -> SampledToken:
        """Sample from `logits` [vocabulary], which change in place. Raises ConstraintError."""
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
        if params.has_penalties:
            self._counts[token] = self._counts.get(token, 0) + 1
        if logprobs is None:
            return SampledToken(token)
        best = logprobs.topk(min(params.logprobs or 0, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), top)

    def _adjust(self, logits: Tensor) -> None:
        params = self.params
        if params.has_penalties:
            self._penalise(logits)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(values, device=logits.device)
        if self._may_not_end:
            logits[list(self.end_tokens)] = -torch.inf
        if self.constraint is not None:
            self.constraint.apply(logits)

    def _penalise(self, logits: Tensor) -> None:
        params = self.params
        device = logits.device
        ids = torch.tensor(list(self._counts), dtype=torch.int64, device=device)
        if params.repetition_penalty != 1.0:
            # Only this penalty counts the prompt too, as in other engines.
            if self._prompt_ids is None:
                self._prompt_ids = torch.tensor(sorted(set(self.prompt)), device=device)
            seen = torch.unique(torch.cat((self._prompt_ids, ids)))
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = torch.tensor(list(self._counts.values()), device=device)
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty

    def next_uniform(self) -> float:
        """Draw a number in [0, 1) from this sequence's generator."""
        if self._generator is None:
            # On the CPU for every device, so that a seed gives the same tokens everywhere.
            self._generator = torch.Generator("cpu")
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
                for _ in range(self.params.drawn_before):
                    # One by one, as they were drawn: one call for many gives other numbers.
                    torch.rand((), generator=self._generator, dtype=torch.float64)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def draw_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Draw a token from each row of `logits`, with the parameters of its sampler."""
    params = [sampler.params for sampler in samplers]
    scaled = logits / _column([row.temperature for row in params], logits)
    points = _column([sampler.next_uniform() for sampler in samplers], logits, torch.float64)
    return _draw_sorted(scaled.softmax(-1), params, points, _TOP_FIRST)


def _draw_sorted(
    probabilities: Tensor, params: Sequence[SamplingParams], points: Tensor, count: int
) -> list[int]:
    """Draw from the `count` most likely tokens of each row; rows that need more are drawn again.

    Most draws and cuts end among the first few hundred tokens, and sorting all takes ten times as
    long. The draw inverts the cumulative distribution at `points`.
    """
    is_whole = count >= probabilities.shape[-1]
    best, order = (
        probabilities.sort(descending=True, stable=True) if is_whole else probabilities.topk(count)
    )
    keep = _kept(best, params, is_whole)
    cumulative = best.double().cumsum(-1)
    index = torch.searchsorted(cumulative, points * _sum_of(keep, cumulative, is_whole))
    tokens = order.gather(-1, index.minimum(keep - 1))
    if not is_whole:
        is_cut = _column([row.has_cuts for row in params], best, torch.bool)
        # top_p is a share of what top_k leaves, which is not known here.
        is_share = _column(
            [row.top_p < 1.0 and row.top_k > count for row in params], best, torch.bool
        )
        tokens[(index >= keep) | (is_cut & (keep == count)) | is_share] = -1
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


def _kept(best: Tensor, params: Sequence[SamplingParams], is_whole: bool) -> Tensor:
    """Return how many sorted probabilities of each row the cuts leave: [rows, 1]."""
    most = best.shape[-1]
    top_k = [min(row.top_k, most) if row.top_k > 0 else most for row in params]
    keep = _column(top_k, best, torch.int64)
    places = torch.arange(most, device=best.device)
    if any(row.top_p < 1.0 for row in params):
        top_p, sums = _column([row.top_p for row in params], best), best.cumsum(-1)
        below = (sums < top_p * _sum_of(keep, sums, is_whole)) & (places < keep)
        reached = below.sum(-1, keepdim=True) + 1
        keep = torch.where(top_p < 1.0, keep.minimum(reached), keep)
    if any(row.min_p > 0.0 for row in params):
        floor = _column([row.min_p for row in params], best) * best[:, :1]
        above = (best >= floor) & (places < keep)
        keep = keep.minimum(above.sum(-1, keepdim=True).clamp_min(1))
    return keep


def _sum_of(keep: Tensor, sums: Tensor, is_whole: bool) -> Tensor:
    """Return the sum of the first `keep` probabilities of each row.

    Where `keep` is all of `sums` but not the whole row, the rest counts too: the sum is one.
    """
    kept = sums.gather(-1, keep - 1)
    return kept if is_whole else torch.where(keep < sums.shape[-1], kept, 1.0)


def _column(values: Sequence[float], beside: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a value for each row, on the device of `beside`: [rows, 1]."""
    return torch.tensor(values, dtype=dtype).to(beside.device, non_blocking=True)[:, None]


def most_likely(logits: Tensor) -> Tensor:
    """Return the most likely token of each row; the first NaN, if there is one."""
    if logits.device.type == "cpu":
        # torch's argmax reads at a third of memory speed. On a busy machine its threads also wait
        # for each other longer than numpy's one thread takes.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class SamplingRun:
    """A sequence to sample for, with the drafts that this step computed for it."""

    sampler: Sampler
    drafts: tuple[int, ...] = ()


@torch.inference_mode()
def sample_step(
    logits: Tensor, runs: Sequence[SamplingRun]
) -> list[list[SampledToken | InvalidLogits]]:
    """Sample for each of `runs`; its rows are one for each draft and one more, in that order.

    Sampling of a run continues while the sampled token is the drafted one, so that the row after a
    draft counts only if the draft was right. Invalid logits end one run and change no other.
    """
    best = most_likely(logits)
    is_finite = logits.gather(-1, best[:, None])[:, 0].isfinite().tolist()
    tokens = best.tolist()
    drawn = _draw_together(logits, runs, is_finite)
    results: list[list[SampledToken | InvalidLogits]] = []
    row = 0
    for run in runs:
        sampled: list[SampledToken | InvalidLogits] = []
        for offset, draft in enumerate((*run.drafts, None)):
            number = row + offset
            result: SampledToken | InvalidLogits
            if not is_finite[number]:
                result = InvalidLogits("cannot sample: the model gave no finite logits")
            elif run.sampler.is_greedy:
                result = SampledToken(tokens[number])
            elif number in drawn:
                result = SampledToken(drawn[number])
            else:
                result = _sample(run.sampler, logits[number])
            sampled.append(result)
            if isinstance(result, InvalidLogits) or result.token != draft:
                break
        results.append(sampled)
        row += len(run.drafts) + 1
    return results


def _draw_together(
    logits: Tensor, runs: Sequence[SamplingRun], is_finite: Sequence[bool]
) -> dict[int, int]:
    """Draw for all runs that have no drafts and need only a plain draw; return tokens by row."""
    rows: list[int] = []
    samplers: list[Sampler] = []
    row = 0
    for run in runs:
        if not run.drafts and is_finite[row] and run.sampler.is_plain_draw:
            rows.append(row)
            samplers.append(run.sampler)
        row += len(run.drafts) + 1
    tokens: list[int] = []
    for start in range(0, len(rows), _DRAW_ROWS_MAX):
        end = start + _DRAW_ROWS_MAX
        part = logits if len(rows) == len(logits) <= _DRAW_ROWS_MAX else logits[rows[start:end]]
        tokens += draw_tokens(part, samplers[start:end])
    return dict(zip(rows, tokens, strict=True))


def _sample(sampler: Sampler, logits: Tensor) -> SampledToken | InvalidLogits:
    try:
        return sampler.sample(logits)
    except ConstraintError as error:
        return GrammarFailed(str(error))
