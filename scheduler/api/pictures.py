"""The picture that placement decides from, to be saved: a bug report, or a what-if's ground."""

from typing import Final

import msgspec

from scheduler.api.endpoint import Call, Endpoint
from scheduler.decide.whatif import ClusterSnapshot


async def picture(call: Call) -> msgspec.Raw:
    """The whole picture, as the planner has it now. It holds no key and no prompt."""
    return await call.acting.planner.snapshot(call.acting.heard())


PICTURE_ENDPOINTS: Final = (
    Endpoint("GET", "/v1/picture", picture, "What placement decides from", ClusterSnapshot),
)
