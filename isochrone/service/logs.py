"""Logs: one JSON object a line on standard error. Never prompts, outputs or keys."""

import logging
import sys
from typing import Final

import msgspec

_encoder = msgspec.json.Encoder(enc_hook=str)
_QUIET: Final = ("aiohttp.access", "asyncio")


class JsonLines(logging.Formatter):
    """Formats a record with the fields given as `extra={"fields": {...}}`."""

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
    """Send every log record of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
