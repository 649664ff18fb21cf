"""The prefill budget: prompt tokens beside decodes do not delay the next tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.scheduler.prefill_budget import (
    PROMPTS_PER_DECODES_S,
    STEP_S_MAX,
    UNMEASURED_TOKENS_MAX,
    PrefillBudget,
)


@settings(deadline=None, max_examples=100)
@given(
    token_ms=st.floats(0.05, 10),
    decodes_ms=st.floats(1, 100),
    decodes=st.integers(1, 64),
    noise=st.lists(st.floats(0.9, 1.1), min_size=20, max_size=40),
)
def test_a_step_with_decodes_keeps_the_interval(
    token_ms: float, decodes_ms: float, decodes: int, noise: list[float]
) -> None:
    budget = PrefillBudget(0.2)
    budget.record_step(200, 0, 200 * token_ms / 1e3)
    budget.record_step(0, decodes, decodes_ms / 1e3)
    for factor in noise:
        prompt = budget.prompt_tokens_allowed(decodes, 500)
        assert BLOCK_TOKENS <= prompt <= 500
        seconds = factor * (prompt * token_ms + decodes_ms) / 1e3
        one_block_s = (BLOCK_TOKENS * token_ms + decodes_ms) / 1e3
        assert seconds <= 1.1 / 0.9 * max(0.2, one_block_s) + 1e-9
        budget.record_step(prompt, decodes, seconds)


def test_prompts_get_the_whole_step_without_decodes_if_it_is_not_too_long() -> None:
    budget = PrefillBudget(0.1)
    assert budget.prompt_tokens_allowed(4, 200) == 200
    budget.record_step(300, 0, 1.9)
    assert budget.prompt_tokens_allowed(0, 300) == 300
    assert budget.prompt_tokens_allowed(4, 300) == BLOCK_TOKENS


def test_no_step_of_a_slow_engine_takes_as_long_as_a_hang() -> None:
    """A prompt of 8,192 tokens at 122 tokens a second would be one step of more than a minute."""
    budget, pending, token_s = PrefillBudget(0.25), 8192, 1 / 122
    while pending:
        tokens = budget.prompt_tokens_allowed(0, min(8192, pending))
        assert 0 < tokens * token_s <= max(STEP_S_MAX, UNMEASURED_TOKENS_MAX * token_s)
        budget.record_step(tokens, 0, tokens * token_s)
        pending -= tokens


def test_the_estimate_rises_at_once_and_falls_gradually() -> None:
    budget = PrefillBudget(1.0)
    budget.record_step(100, 0, 1.0)
    assert budget.prompt_tokens_allowed(1, 1000) == 100
    budget.record_step(100, 0, 2.0)
    assert budget.prompt_tokens_allowed(1, 1000) == 50
    budget.record_step(100, 0, 1.0)
    assert 50 < budget.prompt_tokens_allowed(1, 1000) < 100


def test_one_slow_step_of_decodes_does_not_slow_down_a_whole_long_prompt() -> None:
    budget = PrefillBudget(0.25)
    budget.record_step(200, 0, 0.2)
    budget.record_step(0, 4, 1.0)
    assert budget.prompt_tokens_allowed(4, 200) == BLOCK_TOKENS
    # The decodes and a block of prompt together took less than that.
    budget.record_step(BLOCK_TOKENS, 4, 0.05 + BLOCK_TOKENS / 1e3)
    assert 150 <= budget.prompt_tokens_allowed(4, 1000) <= 200


def test_a_step_may_end_once_its_prompts_take_much_longer_than_decodes() -> None:
    budget = PrefillBudget(1.0)
    assert not budget.may_end_step(1000, 4)
    budget.record_step(100, 0, 0.1)
    budget.record_step(0, 4, 0.01)
    for decodes in (0, 4):
        assert not budget.may_end_step(20, decodes)
        assert budget.may_end_step(21, decodes)
    # More decodes have not been measured.
    assert not budget.may_end_step(40, 8)
    assert budget.may_end_step(41, 8)


@settings(deadline=None, max_examples=100)
@given(
    token_ms=st.floats(0.05, 10),
    decodes_ms=st.floats(1, 100),
    prompts=st.lists(st.integers(1, 400), min_size=1, max_size=40),
)
def test_steps_of_single_prompts_are_nearly_as_fast_as_long_ones(
    token_ms: float, decodes_ms: float, prompts: list[int]
) -> None:
    budget = PrefillBudget(1.0)
    budget.record_step(200, 0, 200 * token_ms / 1e3)
    budget.record_step(0, 1, decodes_ms / 1e3)
    steps, tokens = 1, 0
    for prompt in prompts:
        if budget.may_end_step(tokens, 1):
            steps, tokens = steps + 1, 0
        tokens += prompt
    prompts_ms = sum(prompts) * token_ms
    assert prompts_ms + (steps - 1) * decodes_ms <= prompts_ms * (1 + 1 / PROMPTS_PER_DECODES_S)
