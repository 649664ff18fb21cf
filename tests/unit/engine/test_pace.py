"""Pace: beside decodes a step takes only so many prompt tokens that the next token is in time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.scheduler.prefill_budget import Pace
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS


@settings(deadline=None, max_examples=100)
@given(
    token_ms=st.floats(0.05, 10),
    decodes_ms=st.floats(1, 100),
    decodes=st.integers(1, 64),
    noise=st.lists(st.floats(0.9, 1.1), min_size=20, max_size=40),
)
def test_a_step_that_decodes_keeps_the_interval(
    token_ms: float, decodes_ms: float, decodes: int, noise: list[float]
) -> None:
    pace = Pace(0.2)
    pace.note(200, 0, 200 * token_ms / 1e3)
    pace.note(0, decodes, decodes_ms / 1e3)
    for factor in noise:
        prompt = pace.prompt_tokens(decodes, 500)
        assert BLOCK_TOKENS <= prompt <= 500
        seconds = factor * (prompt * token_ms + decodes_ms) / 1e3
        least = (BLOCK_TOKENS * token_ms + decodes_ms) / 1e3
        assert seconds <= 1.1 / 0.9 * max(0.2, least) + 1e-9
        pace.note(prompt, decodes, seconds)


def test_prompts_have_all_of_a_step_without_decodes_and_before_anything_is_measured() -> None:
    pace = Pace(0.1)
    assert pace.prompt_tokens(4, 300) == 300
    pace.note(300, 0, 3.0)
    assert pace.prompt_tokens(0, 300) == 300
    assert pace.prompt_tokens(4, 300) == BLOCK_TOKENS


def test_a_slower_machine_is_believed_at_once_a_faster_one_by_and_by() -> None:
    pace = Pace(1.0)
    pace.note(100, 0, 1.0)
    assert pace.prompt_tokens(1, 1000) == 100
    pace.note(100, 0, 2.0)
    assert pace.prompt_tokens(1, 1000) == 50
    pace.note(100, 0, 1.0)
    assert 50 < pace.prompt_tokens(1, 1000) < 100


def test_one_slow_step_of_decodes_alone_does_not_hold_up_a_long_prompt_to_its_end() -> None:
    pace = Pace(0.25)
    pace.note(200, 0, 0.2)
    pace.note(0, 4, 1.0)
    assert pace.prompt_tokens(4, 200) == BLOCK_TOKENS
    # With a prompt beside them the decodes took less than that.
    pace.note(BLOCK_TOKENS, 4, 0.05 + BLOCK_TOKENS / 1e3)
    assert 150 <= pace.prompt_tokens(4, 1000) <= 200
