"""Converts documents, a few at once, each in a process of its own.

A document may take its process 20 s. So tenants take turns: a tenant that sends many waits behind
its own, and loses its last ones if there are too many.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePath
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from router.decide.admission.fair_queue import FairQueue, QueueFull, Ticket
from router.documents.formats import FORMATS

AT_ONCE_MAX: Final = 2
WAITING_MAX: Final = 16
TIMEOUT_S: Final = 50.0
OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""More than the JSON of the longest Markdown. A process that a document has taken over may write
without end."""

VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""What a process gets of the router's environment, with Python's own variables: others may be
secrets, and a document may take its process over."""

WAITING_BYTES_MAX: Final = 1 << 40
"""The router's limits on bodies bound the documents in memory."""

BUSY_RETRY_AFTER_S: Final = 5.0
LANE: Final = "documents"


class ConvertedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The Markdown of a document, or why there is none; one of the two is empty."""

    data: str = ""
    error: str = ""


class DocumentConverter:
    """Bounds the conversions of one router process."""

    def __init__(self, command: Callable[[str], list[str]] | None = None) -> None:
        """Convert with `command`, which is given the extension; by default the module `child`."""
        self._command = command or _child
        self._waiting: FairQueue[Ticket] = FairQueue(WAITING_MAX, WAITING_BYTES_MAX)
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        """The turn of each waiting document. A turn is done when its document may be converted and
        counts as running."""
        self._running = 0

    async def convert(
        self, tenant_id: TenantId, name: str, document: bytes, charset: str = ""
    ) -> ConvertedDocument:
        """Convert one document of a tenant. `charset` is that of its text, "" if it is not known.

        Raises ApiError 429 if too many of its own wait, and 503 if no process can be started.
        """
        extension = PurePath(name).suffix.lower()
        if extension not in FORMATS:
            known = ", ".join(FORMATS)
            return ConvertedDocument(error=f"its name does not end in one of {known}")
        await self._take_turn(tenant_id)
        try:
            return await self._run(extension, document, charset)
        finally:
            self._running -= 1
            self._begin_next()

    async def _take_turn(self, tenant_id: TenantId) -> None:
        """Wait until another document may be converted, and count it. Raises ApiError 429."""
        ticket = Ticket(LANE, tenant_id, tokens=1)
        try:
            ousted = self._waiting.push(ticket)
        except QueueFull:
            raise _busy() from None
        if ousted is not None and not (lost := self._turns[ousted]).done():
            lost.set_exception(_busy())
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(ticket)
            # Its turn may have come just before its client left.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._running -= 1
                self._begin_next()
            raise
        finally:
            del self._turns[ticket]

    def _begin_next(self) -> None:
        while self._running < AT_ONCE_MAX and (first := self._waiting.head(LANE)) is not None:
            self._waiting.take(first, asyncio.get_running_loop().time())
            turn = self._turns[first]
            if not turn.done():  # its client may have left just now
                self._running += 1
                turn.set_result(None)

    async def _run(self, extension: str, document: bytes, charset: str) -> ConvertedDocument:
        process = await self._start(extension, charset)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output = await _exchange(process, document)
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

    async def _start(self, extension: str, charset: str) -> asyncio.subprocess.Process:
        """Start a process that converts a document. Raises ApiError 503."""
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            return await asyncio.create_subprocess_exec(
                *self._command(extension),
                *([charset] if charset else []),
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                env=_environment(),
            )
        except OSError as error:
            # The machine has no memory, processes or descriptors left: not the document's fault.
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot convert documents now: the router cannot start a process"
                f" ({error.strerror or error})",
                retry_after_s=BUSY_RETRY_AFTER_S,
            ) from error


async def _exchange(process: asyncio.subprocess.Process, document: bytes) -> bytes:
    """Send a process a document; return what it writes, nothing if that is too much."""
    assert process.stdin is not None and process.stdout is not None
    sending = asyncio.create_task(_send(process.stdin, document))
    try:
        await process.stdout.readexactly(OUTPUT_BYTES_MAX)
        process.kill()
        # Its pipe is closed once it is empty.
        while await process.stdout.read(OUTPUT_BYTES_MAX):
            pass
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return b""


async def _send(stdin: asyncio.StreamWriter, document: bytes) -> None:
    with suppress(ConnectionError):  # the process has ended
        stdin.write(document)
        await stdin.drain()
    stdin.close()


def _busy() -> ApiError:
    return ApiError(
        ErrorCode.OUT_OF_CAPACITY,
        "cannot convert the document now: too many of this tenant's documents wait",
        retry_after_s=BUSY_RETRY_AFTER_S,
    )


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in VARIABLES or name.startswith("PYTHON")
    }


def _child(extension: str) -> list[str]:
    return [sys.executable, "-m", "router.documents.child", extension]
