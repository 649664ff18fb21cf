"""Sampling: each knob does what it says, a seed means the same in any company."""

from typing import Any

import pytest
import torch

from nodeagent.engine.sampling import sampler as sampling
from nodeagent.engine.sampling.sampler import (
    InvalidLogits,
    SampledToken,
    Sampler,
    SamplingParams,
    SamplingRun,
    most_likely,
    sample_step,
)

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def sample_rows(
    logits: torch.Tensor, samplers: list[Sampler]
) -> list[SampledToken | InvalidLogits]:
    """Sample each row of `logits` by its own sampler."""
    return [run[0] for run in sample_step(logits, [SamplingRun(sampler) for sampler in samplers])]


def test_the_likeliest_is_the_one_that_torch_finds() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    for row, values in enumerate(([nan, inf], [inf, nan], [inf, inf], [-inf] * 1000)):
        logits[row, : len(values)] = torch.tensor(values)
    assert most_likely(logits).tolist() == logits.max(-1).indices.tolist()
    assert most_likely(logits[:, 1:500]).tolist() == logits[:, 1:500].max(-1).indices.tolist()


def draws(params: SamplingParams, count: int = 200) -> set[int]:
    sampler = Sampler(params, [])
    return {sampler.sample(LOGITS.clone()).token for _ in range(count)}


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(SamplingParams(temperature=0), 3) == {1}


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(top_k=2, seed=1), {1, 2}),
        (SamplingParams(top_k=1, seed=1), {1}),
        (SamplingParams(top_p=0.5, seed=1), {1}),
        (SamplingParams(top_p=0.8, seed=1), {1, 2}),
        (SamplingParams(min_p=0.3, seed=1), {1, 2}),
        (SamplingParams(temperature=2.0, seed=1), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=2.0, seed=1, top_k=-1), {0, 1, 2, 3, 4}),
    ],
)
def test_tails_are_cut(params: SamplingParams, wanted: set[int]) -> None:
    assert draws(params) == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("withheld", [0, 1, 3])
def test_nothing_ends_an_answer_before_it_is_long_enough(temperature: float, withheld: int) -> None:
    """However many tokens a step gives."""
    params = SamplingParams(temperature, min_tokens=withheld, drawn_before=2, seed=2)
    for drafts in ((), (2,), (2, 2), (2, 2, 2, 1)):
        sampler = Sampler(params, [], end_tokens=frozenset({1, 4}))
        said: list[int] = []
        while len(said) < 6:
            rows = torch.tensor([0.0, 60.0, 30.0, 0.0, 50.0]).repeat(len(drafts) + 1, 1)
            (run,) = sample_step(rows, [SamplingRun(sampler, drafts)])
            said += [one.token for one in run if isinstance(one, SampledToken)]
        assert said[:6] == [2] * withheld + [1] * (6 - withheld)


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(SamplingParams(seed=11), [])
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[sampler.sample(LOGITS.clone()).token] += 1
    assert torch.allclose(counts / 4000, LOGITS.softmax(-1), atol=0.03)


@pytest.mark.parametrize("heat", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"top_k": 50},
        {"top_k": 700},
        {"top_p": 0.9},
        {"top_p": 0.999, "top_k": 2000},
        {"top_p": 0.7, "top_k": 300},
        {"top_p": 0.5, "top_k": 300},
        {"min_p": 0.05},
        {"min_p": 1e-5, "top_p": 0.99},
    ],
    ids=str,
)
def test_a_draw_among_the_likeliest_is_the_draw_among_all(
    heat: float, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 4 * torch.randn(24, 3000, generator=torch.Generator().manual_seed(1))
    logits[3:6, 2:] = float("-inf")
    told = []
    for likeliest_too in (sampling._TOP_FIRST, 3000):
        monkeypatch.setattr(sampling, "_TOP_FIRST", likeliest_too)
        samplers = [
            Sampler(SamplingParams(temperature=heat, seed=row, **knobs), []) for row in range(24)
        ]
        told.append([sample_rows(logits.clone(), samplers) for _ in range(10)])
    assert told[0] == told[1]


def test_a_seed_gives_the_same_in_any_company() -> None:
    alone = Sampler(SamplingParams(seed=5), [])
    first = [alone.sample(LOGITS.clone()).token for _ in range(20)]
    crowd = [Sampler(SamplingParams(seed=seed), []) for seed in (4, 5, None)]
    second = []
    for _ in range(20):
        rows = sample_rows(LOGITS.repeat(3, 1), crowd)
        assert isinstance(rows[1], SampledToken)
        second.append(rows[1].token)
    assert first == second


def test_penalties_and_bias_move_the_choice() -> None:
    def greedy(prompt: tuple[int, ...] = (), **knobs: object) -> list[int]:
        params = SamplingParams(temperature=0, **knobs)  # type: ignore[arg-type]
        sampler = Sampler(params, list(prompt))
        return [sampler.sample(LOGITS.clone()).token for _ in range(3)]

    assert greedy() == [1, 1, 1]
    assert greedy(presence_penalty=1.5) == [1, 2, 1]
    assert greedy(frequency_penalty=0.7) == [1, 1, 2]
    assert greedy((1,), repetition_penalty=2.0) == [2, 1, 1]
    assert greedy(logit_bias=((4, 100.0),)) == [4, 4, 4]


def test_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(SamplingParams(temperature=0, logit_bias=((4, 100.0),), logprobs=2), [])
    told = sampler.sample(LOGITS.clone())
    wanted = LOGITS.log_softmax(-1)
    assert told.token == 4
    assert told.logprob == pytest.approx(float(wanted[4]))
    assert [token for token, _ in told.top] == [1, 2]


def test_an_unsound_row_harms_no_other() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = torch.nan
    logits[2, :] = -torch.inf
    rows = sample_rows(logits, [Sampler(SamplingParams(temperature=0), []) for _ in range(3)])
    assert rows[0] == SampledToken(1)
    assert isinstance(rows[1], InvalidLogits)
    assert isinstance(rows[2], InvalidLogits)


def test_draws_together_are_those_of_each_alone() -> None:
    knobs = [
        SamplingParams(temperature=0.5 + at % 3 / 2, top_k=k, top_p=p, min_p=m, seed=at)
        for at, (k, p, m) in enumerate(
            (k, p, m) for k in (0, 1, 4, 400) for p in (1.0, 0.6) for m in (0.0, 0.2)
        )
    ]
    alone, together = ([Sampler(one, []) for one in knobs] for _ in range(2))
    chance = torch.Generator().manual_seed(1)
    for _ in range(5):
        logits = 2 * torch.randn(len(knobs), 300, generator=chance)
        wanted = [one.sample(row.clone()) for one, row in zip(alone, logits, strict=True)]
        # One that is unsound, one that is greedy and one that is told of others change nothing.
        others = [Sampler(SamplingParams(), []), Sampler(SamplingParams(temperature=0), [])]
        others.append(Sampler(SamplingParams(seed=1, logprobs=2), []))
        logits = torch.cat((torch.full((1, 300), torch.nan), logits[:2], logits))
        found = sample_rows(logits, others + together)
        assert isinstance(found[0], InvalidLogits)
        assert found[3:] == wanted
