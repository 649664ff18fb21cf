"""The snapshot of the cluster that placement decides from: for bug reports and what-if plans."""

from typing import Final

import msgspec

from scheduler.api.admin.endpoint import AdminRequest, Endpoint
from scheduler.decide.whatif import ClusterSnapshot


async def snapshot(request: AdminRequest) -> msgspec.Raw:
    """Read the planner's snapshot of the cluster. It contains no keys and no prompts."""
    return await request.context.planner.snapshot(request.context.heartbeats.observed())


async def picture(request: AdminRequest) -> msgspec.Raw:
    """Answer the commands of the release before, which have the old name of this endpoint."""
    return await snapshot(request)


SNAPSHOT_ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/snapshot",
        snapshot,
        "Read the snapshot that placement decides from",
        ClusterSnapshot,
    ),
    Endpoint("GET", "/v1/picture", picture, "The old name of /v1/snapshot", ClusterSnapshot),
)
