"""Converts documents, a few at once, each in a process of its own."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.documents.formats import FORMATS

AT_ONCE_MAX: Final = 2
WAITING_MAX: Final = 16
TIMEOUT_S: Final = 50.0
BUSY_RETRY_AFTER_S: Final = 5.0


class ConvertedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The Markdown of a document, or why there is none; one of the two is empty."""

    data: str = ""
    error: str = ""


class DocumentConverter:
    """Bounds the conversions of one router process."""

    def __init__(self, command: Callable[[str], list[str]] | None = None) -> None:
        """Convert with `command`, which is given the extension; by default the module `child`."""
        self._command = command or _child
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)
        self._open = 0

    async def convert(self, name: str, document: bytes) -> ConvertedDocument:
        """Convert one document. Raises ApiError 429 if too many wait."""
        extension = PurePath(name).suffix.lower()
        if extension not in FORMATS:
            known = ", ".join(FORMATS)
            return ConvertedDocument(error=f"its name does not end in one of {known}")
        if self._open >= AT_ONCE_MAX + WAITING_MAX:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot convert {name[:60]!r} now: {self._open} documents are being converted",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        self._open += 1
        try:
            async with self._slots:
                return await self._run(extension, document)
        finally:
            self._open -= 1

    async def _run(self, extension: str, document: bytes) -> ConvertedDocument:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command(extension), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate(document)
        except TimeoutError:
            return ConvertedDocument(error=f"it takes longer than {TIMEOUT_S:g} s to read")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return msgspec.json.decode(output, type=ConvertedDocument)
        except msgspec.DecodeError:
            return ConvertedDocument(error="reading it needs too much memory or time")


def _child(extension: str) -> list[str]:
    return [sys.executable, "-m", "router.documents.child", extension]
