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


def error_text(error: BaseException) -> str:
    """Return an error's message, or its type's name if it has none, as a timeout."""
    return str(error) or type(error).__name__


class RepeatFilter:
    """Says which of many like events are logged. The caller passes the monotonic time."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Logged] = {}

    def knows(self, kind: str) -> bool:
        """Return whether an event of this kind was logged before."""
        return kind in self._kinds

    def times_to_log(self, kind: str, now: float) -> int:
        """Count an event; return how many there were since one was logged, 0 to log none now."""
        logged = self._kinds.get(kind)
        if logged is not None and now - logged.at < REPEAT_S:
            self._kinds[kind] = logged._replace(unlogged=logged.unlogged + 1)
            return 0
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = _Logged(now, 0)
        return 1 if logged is None else logged.unlogged + 1


class RepeatedWarning:
    """A warning that a job may give in each turn: each reason at most once a minute."""

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._reasons = RepeatFilter()

    def record(self, reason: str, now: float) -> None:
        """Log the warning, unless it was logged with this reason within the last minute."""
        times = self._reasons.times_to_log(reason, now)
        if times:
            fields: dict[str, object] = {"reason": reason[:200]}
            if times > 1:
                fields["times_since_last_logged"] = times
            self._logger.warning(self._message, extra={"fields": fields})


class FailureLog:
    """The failures of one job. The caller passes the monotonic time.

    A kind is an error's type and the line that raised it. Each subclass of OSError, which means an
    unreachable or hanging server, disk or database, is one kind and is logged without a traceback.
    Any other kind has a traceback when it is logged first.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._kinds = RepeatFilter()

    def record(self, error: Exception, now: float) -> None:
        """Log a failure, unless its kind was logged within the last minute."""
        kind = _kind_of(error)
        is_new_bug = not self._kinds.knows(kind) and not isinstance(error, OSError)
        times = self._kinds.times_to_log(kind, now)
        if not times:
            return
        fields: dict[str, object] = {"job": self._job, "error": _words(error)[:500]}
        if times > 1:
            fields["times_since_last_logged"] = times
        log.error("turn failed", exc_info=error if is_new_bug else None, extra={"fields": fields})


def _words(error: Exception) -> str:
    """Return the error's type and text. The repr of an OSError lacks its file."""
    is_of_file = isinstance(error, OSError) and error.filename is not None
    return f"{type(error).__name__}({str(error)!r})" if is_of_file else repr(error)


def _kind_of(error: Exception) -> str:
    name = type(error).__name__
    frame = error.__traceback__
    if frame is None or isinstance(error, OSError):
        return name
    while frame.tb_next is not None:
        frame = frame.tb_next
    return f"{name} {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
