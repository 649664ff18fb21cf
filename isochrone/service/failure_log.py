"""Logs what fails again and again: one line for each kind of failure, at most once a minute."""

import logging
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""A kind of failure is logged again after this time at the earliest, with a count."""

KINDS_MAX: Final = 50
"""Kinds remembered; beyond it all are forgotten, and logged as new."""


class _Logged(NamedTuple):
    """The time at which a kind was last logged, and the number of its failures not logged since."""

    at: float
    unlogged: int


class FailureLog:
    """The failures of one job. The caller passes the monotonic time.

    A kind is an error's type and the line that raised it. Of OSError, which means an unreachable or
    hanging server, disk or database, each subclass is one kind and has no traceback. Any other kind
    has one when it is logged first.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._kinds: dict[str, _Logged] = {}

    def record(self, error: Exception, now: float) -> None:
        """Log a failure, unless its kind was logged within the last minute."""
        kind = _kind_of(error)
        logged = self._kinds.get(kind)
        if logged is not None and now - logged.at < REPEAT_S:
            self._kinds[kind] = logged._replace(unlogged=logged.unlogged + 1)
            return
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = _Logged(now, 0)
        fields: dict[str, object] = {"job": self._job, "error": repr(error)[:500]}
        if logged is not None and logged.unlogged:
            fields["times_since_last_logged"] = logged.unlogged + 1
        is_new_bug = logged is None and not isinstance(error, OSError)
        log.error("turn failed", exc_info=error if is_new_bug else None, extra={"fields": fields})


def _kind_of(error: Exception) -> str:
    name = type(error).__name__
    frame = error.__traceback__
    if frame is None or isinstance(error, OSError):
        return name
    while frame.tb_next is not None:
        frame = frame.tb_next
    return f"{name} {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
