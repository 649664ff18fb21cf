"""The router's messages about stored responses to the acting scheduler."""

import asyncio
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import relay
from isochrone.wire.peers import responses as wire
from isochrone.wire.peers.routes import KeyEntry
from router.scheduler_client import SchedulerClient

FINISH_ATTEMPTS: Final = 60
FINISH_PAUSE_S: Final = 1.0
"""How often, and with which pause, a response's end is sent until a scheduler has stored it."""

_BEGUN: Final = msgspec.msgpack.Decoder(wire.BegunResponse)
_FINISHED: Final = msgspec.msgpack.Decoder(wire.FinishedResponse)
_LEASED: Final = msgspec.msgpack.Decoder(wire.LeasedResponses)


class ResponseClient:
    """Sends each message, and decodes the answer. All methods raise ApiError."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    @property
    def is_connected(self) -> bool:
        """Whether a scheduler has let this router store responses."""
        return bool(self._client.access.token)

    async def begin(self, message: wire.BeginResponse) -> wire.BegunResponse:
        """Store a response that begins; return what it builds on."""
        return _BEGUN.decode(await self._client.post(wire.BEGIN_PATH, message))

    async def lease(self, message: wire.LeaseResponses) -> wire.LeasedResponses:
        """Renew leases, and lease background responses."""
        return _LEASED.decode(await self._client.post(wire.LEASE_PATH, message))

    async def finish(self, message: wire.FinishResponse) -> bool:
        """Store how a response ended; return false if it had ended before, or none can store it.

        While no scheduler can be reached the message is sent again for a minute.
        """
        for _ in range(FINISH_ATTEMPTS):
            try:
                stored = await self._client.post(wire.FINISH_PATH, message)
                return _FINISHED.decode(stored).is_stored
            except ApiError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    return False
                await asyncio.sleep(FINISH_PAUSE_S)
        return False

    async def discard(self, response_id: str, key: KeyEntry) -> bool:
        """Delete a response that its client does not know; return whether that was done.

        While no scheduler can be reached the message is sent again for a minute.
        """
        path = f"{relay.PUBLIC_PREFIX}/v1/responses/{response_id}"
        of_key = {relay.TENANT: key.tenant_id, relay.KEY: key.key_id}
        for _ in range(FINISH_ATTEMPTS):
            try:
                async with self._client.request("DELETE", path, headers=of_key):
                    return True
            except ApiError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    return False
                await asyncio.sleep(FINISH_PAUSE_S)
        return False
