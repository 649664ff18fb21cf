"""What fails again and again is logged once a minute for each kind, with a count."""

import pytest

from isochrone.service.failure_log import REPEAT_S, FailureLog


def failure(error: Exception) -> Exception:
    """Return an error that was raised."""
    try:
        raise error
    except Exception as raised:
        return raised


def test_alternating_failures_are_logged_once_a_minute_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog("job")
    for second in range(int(2 * REPEAT_S)):
        error = TimeoutError(f"{second}") if second % 2 else ConnectionResetError(f"{second}")
        log.record(failure(error), float(second))
    assert len(caplog.records) == 4
    assert not any(record.exc_info for record in caplog.records)
    counts = [record.__dict__["fields"].get("times_since_last_logged") for record in caplog.records]
    assert counts == [None, None, 30, 30]


def test_a_bug_is_logged_with_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog("job")
    log.record(failure(ValueError("1")), 0.0)
    log.record(failure(ValueError("2")), REPEAT_S)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    try:
        raise ValueError("elsewhere")
    except ValueError as other:
        log.record(other, REPEAT_S)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, True]
