"""How long a vendor engine's step may take, and the speed from which that follows."""

import msgspec
import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.replicas.health import EngineWatch, kill_reason, observe
from nodeagent.decide.replicas.step_limit import (
    LIMIT_S_MAX,
    MARGIN,
    STEP_TOKENS_DEFAULT,
    step_limit_s,
    step_tokens_max,
)
from nodeagent.host.engines.canary import CANARIES, PROMPT_CANARY, long_canary, tokens_read


@pytest.mark.parametrize(
    ("driver", "options", "tokens"),
    [
        ("vllm", {"max_num_batched_tokens": "512"}, 512),
        ("vllm", {"max_num_batched_tokens": "8k"}, 8000),
        ("vllm", {"max_num_batched_tokens": "2K"}, 2048),
        ("vllm", {}, STEP_TOKENS_DEFAULT),
        ("sglang", {"chunked_prefill_size": "4096"}, 4096),
        ("sglang", {"chunked_prefill_size": "-1"}, STEP_TOKENS_DEFAULT),
        ("llama_cpp", {"batch_size": "128"}, 128),
        ("embedded", {"batch_tokens_max": "128"}, 0),
        ("mock", {}, 0),
    ],
)
def test_the_most_tokens_of_a_step_are_those_of_the_engines_option(
    driver: str, options: dict[str, str], tokens: int
) -> None:
    assert step_tokens_max(EngineSettings(driver=driver, options=options)) == tokens


def test_a_step_may_take_several_times_as_long_as_measured() -> None:
    assert step_limit_s(2048, 122.0) == pytest.approx(MARGIN * 2048 / 122)
    assert step_limit_s(2048, 0.01) == LIMIT_S_MAX
    assert step_limit_s(2048, 0.0) == step_limit_s(0, 100.0) == 0.0


def test_a_slow_engine_lives_through_its_longest_step_and_a_hung_one_does_not() -> None:
    limit_s = max(15.0, step_limit_s(2048, 122.0))
    watch = EngineWatch()
    for second in range(1, int(limit_s) + 3):
        watch = observe(watch, answered=True, steps=0, bytes_out=0, in_flight=1)
        reason = kill_reason(watch, stall_s=limit_s, in_flight=1)
        assert bool(reason) is (second > limit_s)
        if second == 17:  # the step's length
            assert kill_reason(watch, stall_s=15.0, in_flight=1) and not reason


def test_a_long_canary_asks_in_the_same_way_with_more_words() -> None:
    for canary in (CANARIES["chat"], PROMPT_CANARY):
        longer = long_canary(canary, "first")
        assert longer.body.keys() == canary.body.keys() and longer.path == canary.path
        assert b'"first 0 1 2 ' in msgspec.json.encode(longer.body)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 90}}', 90),
        (b'{"usage": {"prompt_tokens": 90, "prompt_tokens_details": null}}', 90),
        (b'{"usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 16}}}', 74),
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": null}}}', 9),
        (b'{"usage": null}', 0),
        (b"{}", 0),
        (b'{"usage": {"prompt_tokens": "many"}}', 0),
        (b"\xff", 0),
    ],
)
def test_cached_tokens_were_not_read(answer: bytes, tokens: int) -> None:
    assert tokens_read(answer) == tokens
