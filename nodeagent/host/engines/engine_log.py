"""The log file of an engine: kept short, and searched for the error that ended the engine."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

LOG: Final = "engine.log"
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
LOG_TAIL_BYTES: Final = 64 * 1024
TRIM_INTERVAL_S: Final = 10.0
"""Between two trims of the log of an engine that loads."""

ERROR_LINE: Final = re.compile(
    rb"\b[A-Za-z_.]*(?:Error|Exception): \S|\b(?:FATAL|fatal|error): \S"
    rb"|\berror loading model[a-z ]*: \S|\bGGML_ASSERT\(|\bwhat\(\): +\S"  # llama.cpp
)
SECOND_HAND: Final = re.compile(
    rb"root cause|Engine core initialization failed|Executor failed"
    rb"|\bexiting due to |\bfailed to (?:load model|create[ _]context|create llama_context)\b"
)
"""Lines with an error that refer to an earlier one."""
DIED: Final = re.compile(rb"\bdied unexpectedly\b")
"""vLLM's line about a process of the engine that was killed, before the errors that follow from it.
One that ended by an error of its own has logged that before."""
ERROR_LEVEL: Final = re.compile(
    rb'\bERROR\b|^\{"at":"[^"]*","level":"(?:error|critical)"'
    rb"|^[\d.]+ E (?!.*\bsend_error: task id = )"
)
"""A line that its engine calls an error, though it names none."""
NO_ERROR: Final = re.compile(
    rb"\b(?:DEBUG|INFO|WARNING)\b|^[\d.]+ [DIW] |^[\d.]+ E .*\bsend_error: task id = "
)
"""Lines that their engine does not call an error, such as vLLM's warning of a low `ulimit`, and
those of llama.cpp about a request that it refuses."""
NO_PROBLEM: Final = re.compile(
    rb'^\{"at":"[^"]*","level":"(?:debug|info)"| - "[A-Z]+ \S+ HTTP/1\.[01]" [1-4]\d\d\b'
    rb"|^[\d.]+ [DIW] |^[\d.]+ E .*\bsend_error: task id = "
)
"""A line that reports no problem: of the embedded engine, of a vendor's access log or of a request,
which is the last one of a healthy engine that is killed."""
NO_CAUSE: Final = (
    "; before it the log has no error: perhaps a process of the engine was killed, as the kernel"
    " does when memory is short (see dmesg)"
)
"""Added to a line that refers to an earlier error if there is none."""
UNFINISHED: Final = re.compile(rb":$|\bvalidation errors? for \w+$")
"""An error whose reason is on the lines that follow."""
LINES_MAX: Final = 4
"""The lines of an unfinished error that are quoted."""
CHARS_MAX: Final = 300
CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours and other control characters, which would reach an operator's terminal."""


class _OwnLine(msgspec.Struct):
    """A line of the embedded engine's log."""

    at: str
    message: str
    exception: str = ""


def last_error(log: Path) -> str:
    """Return the last error in an engine's log, else its last line, "" if that is no problem.

    The last line of all is often a warning or a message about the shutdown.
    """
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        lines = [line.rstrip() for line in file.read(LOG_TAIL_BYTES).splitlines() if line.strip()]
        errors = [n for n, line in enumerate(lines) if _is_error(line)]
        first_hand = [n for n in errors if not SECOND_HAND.search(lines[n])]
        died = [n for n, line in enumerate(lines) if DIED.search(line)]
        levels = [n for n, line in enumerate(lines) if ERROR_LEVEL.search(line)]
        reported = [n for n in levels if not SECOND_HAND.search(lines[n])]
        last = [] if not lines or NO_PROBLEM.search(lines[-1]) else [len(lines) - 1]
        for found in (first_hand, died, errors, reported, levels, last):
            if found:
                follows = not first_hand and (died or errors)
                return _quote(lines[found[-1] :]) + (NO_CAUSE if follows else "")
    return ""


def _is_error(line: bytes) -> bool:
    found = ERROR_LINE.search(line)
    return found is not None and NO_ERROR.search(line, 0, found.start()) is None


def _quote(lines: list[bytes]) -> str:
    """Return the first line as text, with those that follow it if it does not say the reason."""
    count = LINES_MAX if UNFINISHED.search(lines[0]) else 1
    texts = [_own_words(line) or line.decode(errors="replace") for line in lines[:count]]
    # A tab would break the line of a table.
    shown = (CONTROL.sub("", text).replace("\t", " ").strip() for text in texts)
    return " ".join(shown)[:CHARS_MAX]


def _own_words(line: bytes) -> str:
    """Return what a line of the embedded engine's log says, without its traceback, "" of others."""
    try:
        found = msgspec.json.decode(line, type=_OwnLine)
    except (ValueError, RecursionError):
        return ""
    raised = found.exception.strip().splitlines()[-1:]
    return ": ".join((found.message, *raised))


def trim_log(path: Path) -> None:
    """Keep the last LOG_BYTES_MAX / 2 bytes of a log that is longer than LOG_BYTES_MAX."""
    with suppress(OSError):
        if path.stat().st_size > LOG_BYTES_MAX:
            with path.open("r+b") as file:
                file.seek(-LOG_BYTES_MAX // 2, os.SEEK_END)
                tail = file.read()
                file.seek(0)
                file.write(tail)
                file.truncate()
