"""Answers requests for sounds and images, through the pipeline like any other inference.

An uploaded sound is on disk while it arrives, so a slow client costs no memory. The router reads it
into memory once it is complete, and keeps it until it is relayed: another replica may need it
again.
"""

import asyncio
from typing import Final

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from router.apis.media.surface import read_media_request
from router.apis.openai.surface import OpenAiSurface
from router.apis.relay import in_a_task
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.dataplane.upload_spool import SpooledBody
from router.pipeline import RequestPipeline

FULL_RETRY_AFTER_S: Final = 5.0


class MediaRoutes:
    """The routes of one process, and the bytes of sounds that it relays now."""

    def __init__(
        self, openai: OpenAiSurface, pipeline: RequestPipeline, relayed_bytes_max: int
    ) -> None:
        """Relay uploads of at most `relayed_bytes_max` bytes at once, half of them one tenant's."""
        self._openai = openai
        self._pipeline = pipeline
        self._relayed = FairShares(relayed_bytes_max)

    async def answer(self, request: HttpRequest, path: str, writer: ResponseWriter) -> None:
        """Answer a request for `path`. Raises ApiError."""
        upload = request.upload
        size = upload.size_bytes if isinstance(upload, SpooledBody) else 0
        assert request.key is not None
        tenant_id = request.key.tenant_id
        if not self._relayed.take(tenant_id, size):
            raise self._full(tenant_id, size)
        try:
            if isinstance(upload, SpooledBody):
                request.body = await in_a_task(asyncio.to_thread(upload.read))
                upload.close()
            await self._pipeline.serve(read_media_request(self._openai, request, path), writer)
        finally:
            self._relayed.give_back(tenant_id, size)

    def _full(self, tenant_id: TenantId, size: int) -> ApiError:
        """Return the error for a sound of `size` bytes for which there is no memory."""
        reason = "the router's memory for sounds is full"
        if self._relayed.is_own_share(tenant_id, size):
            reason = "your sounds would take more than the router's memory for one tenant's"
        return ApiError(
            ErrorCode.OUT_OF_CAPACITY,
            f"cannot take the sound now: {reason}",
            retry_after_s=FULL_RETRY_AFTER_S,
        )
