"""The header in which an engine says how it spent a request's time."""

import pytest

from isochrone.wire.engines.engine_times import EngineTimes, format_times, parse_times


@pytest.mark.parametrize(
    "times",
    [EngineTimes(), EngineTimes(queue=0.25, prefill=1.5), EngineTimes(wait_kv=1.0, decode=90.0)],
)
def test_times_are_read_as_they_were_written(times: EngineTimes) -> None:
    assert parse_times(format_times(times)) == times


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "queue",
        "queue=",
        "queue=x",
        "queue=nan",
        "queue=inf",
        "queue=1e300",
        "queue=-1",
        "other=1",
        "=1",
    ],
)
def test_what_cannot_be_read_took_no_time(text: str) -> None:
    assert parse_times(text + ";prefill=0.5") == EngineTimes(prefill=0.5)


def test_a_long_header_is_read_up_to_its_limit() -> None:
    assert parse_times("x=1;" * 10_000 + "prefill=1") == EngineTimes()
