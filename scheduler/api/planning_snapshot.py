"""The picture that placement decides from, to be saved: a bug report, or a what-if's ground."""

from typing import Final

import msgspec

from scheduler.api.endpoint import AdminRequest, Endpoint
from scheduler.decide.what_if import Picture


async def picture(call: AdminRequest) -> msgspec.Raw:
    """The whole picture, as the planner has it now. It holds no key and no prompt."""
    return await call.acting.planner.picture(call.acting.heard())


PICTURE_ENDPOINTS: Final = (
    Endpoint("GET", "/v1/picture", picture, "What placement decides from", Picture),
)
