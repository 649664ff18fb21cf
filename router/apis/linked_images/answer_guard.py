"""Closes a connection whose bytes cost more than they bring: interim answers, or tiny chunks.

The client's parser makes an object of each head and each chunk that arrives, and waits for the next
answer after any number of interim ones. A host could keep the event loop busy with that for the
whole time of a request, and send nothing.
"""

import asyncio
from functools import partial
from ssl import SSLContext
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

FRAMING_BYTES_MAX: Final = 16 * 1024
"""What a host may send besides the file: heads have 1 to 4 kB."""

FRAMING_SHARE: Final = 16
"""Besides, a byte for as many of the file: chunks of 100 bytes have 7 to 10 bytes around them."""

STEP_BYTES: Final = 4096


class GuardedAnswer(ResponseHandler):
    """A connection for one answer of a host that is not trusted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._received_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, step by step, and close the connection if it is too costly."""
        for begin in range(0, len(data), STEP_BYTES):
            step = data[begin : begin + STEP_BYTES]
            self._received_bytes += len(step)
            super().data_received(step)
            payload = self._payload
            file_bytes = 0 if payload is None else payload.total_bytes
            framing_bytes = self._received_bytes - file_bytes
            if framing_bytes > FRAMING_BYTES_MAX + file_bytes // FRAMING_SHARE:
                broken = aiohttp.ClientPayloadError("cannot read the answer: it has little content")
                if payload is not None:
                    payload.set_exception(broken)
                self.set_exception(broken)
                if self.transport is not None:
                    self.transport.abort()
                return


class GuardedConnector(aiohttp.TCPConnector):
    """Opens connections with a guard, each for one request."""

    def __init__(self, resolver: aiohttp.abc.AbstractResolver, limit: int, tls: SSLContext) -> None:
        """Open at most `limit` connections."""
        super().__init__(resolver=resolver, limit=limit, ssl=tls, force_close=True)
        # aiohttp has no parameter for it.
        self._factory = partial(GuardedAnswer, loop=self._loop)  # type: ignore[assignment]
