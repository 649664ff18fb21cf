"""Messages between the scheduler and its planner: msgpack, each after its length in bytes.

The planner reads the fleet from the store. A request carries only what the store does not know.
"""

import asyncio
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, Epoch
from scheduler.decide.membership import LivenessLimits, NodeContact

LENGTH_BYTES: Final = 4
NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


class PlannerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a planner."""

    database_url: str
    liveness: LivenessLimits
    log_level: str


class PlanRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask what should start and end now. Answered with a PlacementPlan.

    With `is_quick`, a small fleet that starts several replicas gets no thorough plan.
    """

    contact: NodeContact
    is_quick: bool = False


class PrefetchRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask which weights to prefetch. Answered with a PrefetchDecision."""

    contact: NodeContact


class ExplainRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask why a deployment runs where it does. Answered with an Explanation, or None."""

    contact: NodeContact
    deployment_id: DeploymentId


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the state that plans are made from. Answered with a ClusterSnapshot as JSON bytes."""

    contact: NodeContact


class LearnRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask to learn the demand of slots that have ended. Answered with a LearnedDemand."""

    epoch: Epoch


class LearnedDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of slots learned, series, and series saved; whether the forecast is new, and whether
    more is left to do at once."""

    slots: int
    series: int
    saved: int
    is_new: bool
    is_behind: bool


PlannerRequest = PlanRequest | PrefetchRequest | ExplainRequest | SnapshotRequest | LearnRequest


class PlannerCall(msgspec.Struct, frozen=True):
    """A request with the number of its reply."""

    number: int
    request: PlannerRequest


class PlannerReply(msgspec.Struct, frozen=True):
    """The answer to the request with this number, or why there is none."""

    number: int
    answer: msgspec.Raw = NOTHING
    failure: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message; raise IncompleteReadError when the stream has ended."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(length)
