"""Logs: one JSON object a line on standard error. They never contain prompts, outputs or keys."""

import logging
import sys
from typing import Final

import msgspec

from isochrone.service.config import ConfigError

_encoder = msgspec.json.Encoder(enc_hook=str)
_QUIET_LOGGERS: Final = ("aiohttp.access", "asyncio")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class JsonLineFormatter(logging.Formatter):
    """Formats a record as JSON, with the fields given as `extra={"fields": {...}}`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, object] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


def setup_logs(service: str, level: str = "INFO") -> None:
    """Send this process's log records of at least `level` to standard error as JSON lines.

    Raises ConfigError.
    """
    if level.upper() not in _LEVELS:
        raise ConfigError(f"cannot use log_level {level!r}: use one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
