"""What fails again and again is logged once a minute for each kind, with a count."""

import asyncio
import logging
from typing import Any

import pytest

from isochrone.service.failure_log import REPEAT_S, FailureLog, RepeatedWarning
from isochrone.wire.errors import ApiError, ErrorCode
from router.loops.answer_responses import AnswerResponses


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


def test_the_file_of_an_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog("job")
    log.record(PermissionError(13, "Permission denied", "/opt/isochrone/bin/python3"), 0.0)
    log.record(FileNotFoundError(2, "No such file or directory"), 0.0)
    errors = [record.__dict__["fields"]["error"] for record in caplog.records]
    assert errors == [
        "PermissionError(\"[Errno 13] Permission denied: '/opt/isochrone/bin/python3'\")",
        "FileNotFoundError(2, 'No such file or directory')",
    ]


def test_a_warning_of_each_turn_is_logged_once_a_minute_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = RepeatedWarning(logging.getLogger("job"), "refused")
    for second in range(int(2 * REPEAT_S)):
        warning.record("revoked" if second % 2 else "unreachable", float(second))
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert [(field["reason"], field.get("times_since_last_logged")) for field in fields] == [
        *(("unreachable", None), ("revoked", None)),
        *(("unreachable", 30), ("revoked", 30)),
    ]


class RefusingClient:
    """A client of a scheduler that has revoked this router."""

    is_connected = True

    async def lease(self, wanted: Any) -> Any:
        raise ApiError(ErrorCode.UNAVAILABLE, "the peer's token is not valid (any more)")


def test_a_router_whose_scheduler_refuses_it_does_not_fill_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client: Any = RefusingClient()
    answer: Any = None
    seconds = iter(range(1000))
    job = AnswerResponses(
        client=client,
        answer=answer,
        open_refs=set(),
        may_lease=lambda: True,
        running_max=1,
        clock=lambda: float(next(seconds)),
    )
    for _ in range(int(REPEAT_S)):
        asyncio.run(job.run_once())
    assert [record.message for record in caplog.records] == ["stored responses"]
