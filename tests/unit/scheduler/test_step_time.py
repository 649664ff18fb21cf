"""The estimated time of a step, beside published rates and for devices that share a layer."""

import msgspec
import pytest

from isochrone.wire.models.model_shape import kv_bytes_per_token
from ops.bench.planner_rates import GOAL, LLAMA_70B, PUBLISHED, estimated_tokens_per_s, groups_of
from scheduler.decide.capacity.device_classes import CLASSES
from scheduler.decide.capacity.step_time import ParallelSplit, StepTime
from tests.builders import a_model


def test_estimates_are_within_the_goal_of_all_published_rates() -> None:
    for row in PUBLISHED:
        ratio = estimated_tokens_per_s(row) / row.tokens_per_s
        assert 1 / GOAL <= ratio <= GOAL, (ratio, row)


def a_step(tensor: int, link_bytes_per_s: float) -> StepTime:
    """Return the steps of a Llama 70B on H100s with another link."""
    kind = msgspec.structs.replace(CLASSES["h100-80g"], link_bytes_per_s=link_bytes_per_s)
    model = msgspec.structs.replace(a_model("m"), shape=LLAMA_70B, weights_bytes=141 * 10**9)
    split = ParallelSplit(tensor=tensor)
    return StepTime(model, kind, split, 1, kv_bytes_per_token(LLAMA_70B))


def test_a_slow_link_costs_its_bytes_in_steps_and_prompts_and_nothing_on_one_device() -> None:
    fast, slow = a_step(4, 450e9), a_step(4, 32e9)
    # 80 layers, two exchanges, 8,192 elements of two bytes, of which a device sends 1.5 times.
    sent = 80 * 2 * 8192 * 2 * 1.5
    expected = sent * (1 / 32e9 - 1 / 450e9) / 0.8
    assert slow.itl_s(64) - fast.itl_s(64) == pytest.approx(64 * expected)
    per_token = 1 / slow.prefill_tokens_per_s() - 1 / fast.prefill_tokens_per_s()
    assert per_token == pytest.approx(expected)
    alone = (a_step(1, 450e9), a_step(1, 32e9))
    assert alone[0].itl_s(64) == alone[1].itl_s(64)


def test_equal_requests_are_answered_in_whole_groups_and_a_rest() -> None:
    assert groups_of(10, 4) == [4, 4, 2]
    assert groups_of(8, 4) == [4, 4]
    assert groups_of(3, 4) == [3]
