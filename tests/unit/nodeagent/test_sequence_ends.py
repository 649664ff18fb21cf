"""How often a sequence ends is measured while an engine runs as many as it can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.sequence_wait import sequence_wait_ms
from nodeagent.decide.requests.sequence_ends import SequenceEnds


@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_answers_that_begin_and_end_together_give_the_mean_over_all_of_them(sequences: int) -> None:
    ends, now_s = SequenceEnds(sequences), 100.0
    for _ in range(2 * sequences):
        ends.record_begin(2 * sequences, now_s)
    for _ in range(5):
        now_s += 8.0
        for _ in range(sequences):
            ends.record_end(2 * sequences, now_s)
        assert ends.mean_ms == pytest.approx(8000 / sequences)


def test_only_ends_of_a_full_engine_count() -> None:
    ends = SequenceEnds(2)
    ends.record_begin(1, 1.0)
    ends.record_end(0, 5.0)
    assert ends.mean_ms is None
    ends.record_begin(1, 6.0)
    ends.record_begin(2, 7.0)
    ends.record_end(1, 9.0)
    assert ends.mean_ms == 2000
    ends.record_end(0, 60.0)
    assert ends.mean_ms == 2000
    ends.record_begin(2, 70.0)
    ends.record_preemption()
    ends.record_end(1, 90.0)
    assert ends.mean_ms == 2000


def test_without_a_known_limit_nothing_is_measured() -> None:
    ends = SequenceEnds(0)
    ends.record_begin(5, 1.0)
    ends.record_end(4, 2.0)
    assert ends.mean_ms is None


@given(st.integers(0, 100), st.integers(0, 20), st.floats(0, 1e6))
def test_a_request_waits_only_where_all_sequences_are_taken(
    requests: int, sequences_max: int, sequence_ms: float
) -> None:
    wait_ms = sequence_wait_ms(requests, sequences_max, sequence_ms)
    if requests < sequences_max or not sequences_max:
        assert wait_ms == 0.0
    else:
        assert wait_ms >= sequence_ms
        assert wait_ms <= sequence_wait_ms(requests + 1, sequences_max, sequence_ms)
