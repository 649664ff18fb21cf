"""What the scheduler asks of its planner and is told: msgpack, each message after its length.

The planner reads the fleet itself. A question carries only what the store does not know.
"""

import asyncio
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, Epoch
from scheduler.decide.membership.liveness import LivenessLimits, NodeContact

LENGTH_BYTES: Final = 4
NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))


class PlannerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a planner is told."""

    database_url: str
    liveness: LivenessLimits
    log_level: str


class PlanRequest(msgspec.Struct, frozen=True, tag=True):
    """What should start and end now? Answered with a Plan."""

    heard: NodeContact


class PrefetchRequest(msgspec.Struct, frozen=True, tag=True):
    """Which weights will be needed where? Answered with Foreseen."""

    heard: NodeContact


class ExplainRequest(msgspec.Struct, frozen=True, tag=True):
    """Why does this deployment run where it does? Answered with an Explanation, or None."""

    heard: NodeContact
    deployment_id: DeploymentId


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """From what would be decided now? Answered with a Picture as JSON, in bytes."""

    heard: NodeContact


class LearnRequest(msgspec.Struct, frozen=True, tag=True):
    """Learn the demand of what has ended, in this term. Answered with Learned."""

    epoch: Epoch


class LearnReply(msgspec.Struct, frozen=True, kw_only=True):
    """Slots learned, series known, series saved; whether what is foretold is new, and if there is
    more to learn."""

    slots: int
    series: int
    saved: int
    is_news: bool
    is_behind: bool


PlannerQuestion = PlanRequest | PrefetchRequest | ExplainRequest | SnapshotRequest | LearnRequest


class PlannerRequest(msgspec.Struct, frozen=True):
    """A question with its number."""

    number: int
    question: PlannerQuestion


class PlannerReply(msgspec.Struct, frozen=True):
    """The answer to the question of this number, or why there is none."""

    number: int
    answer: msgspec.Raw = NOTHING
    failure: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    frame = msgspec.msgpack.encode(message)
    return len(frame).to_bytes(LENGTH_BYTES, "big") + frame


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message, or raise IncompleteReadError where there is none any more."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(length)
