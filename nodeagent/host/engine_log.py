"""The log file of an engine: kept short, and searched for the error that ended the engine."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

LOG: Final = "engine.log"
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
LOG_TAIL_BYTES: Final = 64 * 1024
TRIM_INTERVAL_S: Final = 10.0
"""Between two trims of the log of an engine that loads."""

ERROR_LINE: Final = re.compile(rb"\b[A-Za-z_.]*(?:Error|Exception): \S|\b(?:FATAL|fatal|error): \S")
SECOND_HAND: Final = re.compile(rb"root cause|Engine core initialization failed")
"""Lines with an error that refer to an earlier one."""
CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours and other control characters, which would reach an operator's terminal."""


def last_error(log: Path) -> str:
    """Return the last line of an engine's log that reports an error, else its last line.

    The last line of all is often a warning or a message about the shutdown.
    """
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        lines = [line for line in file.read(LOG_TAIL_BYTES).splitlines() if line.strip()]
        errors = [line for line in lines if ERROR_LINE.search(line)]
        first_hand = [line for line in errors if not SECOND_HAND.search(line)]
        for found in (first_hand, errors, lines):
            if found:
                return CONTROL.sub("", found[-1].decode(errors="replace")).strip()[:300]
    return ""


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
