"""The memory of requests whose bodies have not all arrived, shared between those that send them."""

from typing import Final

from aiohttp import web

from isochrone.fair_shares import FairShares
from isochrone.service.network.connection_count import client_network
from isochrone.service.network.http_server import read_body
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers

UNFINISHED_BYTES_MAX: Final = 1024**3
"""Routers and nodes are many, and one of them may have been broken into. 5,000 connections that
each begin a body of 8 MiB would take 40 GB."""


class UnfinishedBodies:
    """The bodies that are being read, each counted with the length that it announces."""

    def __init__(self, most_bytes: int = UNFINISHED_BYTES_MAX) -> None:
        """Start with none."""
        self._shares = FairShares(most_bytes)

    async def read(self, request: web.Request, *, bytes_max: int, timeout_s: float) -> bytes:
        """Read a whole body, as `read_body` does.

        Raises ApiError 429 if its sender's unfinished bodies take more than is still free.
        """
        announced = request.content_length
        size = bytes_max if announced is None else min(announced, bytes_max)
        sender = client_network(request.transport) if request.transport is not None else ""
        if not self._shares.take(sender, size):
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot read the body: others from {sender} have not all arrived",
                retry_after_s=1.0,
                headers={headers.REFUSED: headers.BUSY},
            )
        try:
            return await read_body(request, bytes_max=bytes_max, timeout_s=timeout_s)
        finally:
            self._shares.give_back(sender, size)
