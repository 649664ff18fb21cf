"""The picture that placement decides from, to be saved: a bug report, or a what-if's ground."""

from typing import Final

from isochrone import __version__
from scheduler.api.endpoint import Call, Endpoint
from scheduler.decide.what_if import Picture


async def picture(call: Call) -> Picture:
    """The whole picture, as the planner has it now. It holds no key and no prompt."""
    return Picture(
        cluster=await call.acting.picture(call.connection),
        liveness=call.acting.config.liveness,
        release=__version__,
    )


PICTURE_ENDPOINTS: Final = (
    Endpoint("GET", "/v1/picture", picture, "What placement decides from", Picture),
)
