"""Messages by which routers share, through the scheduler, the requests that make engines fail.

The scheduler passes a message on to every other router that registered with SUSPICIONS. It keeps
nothing, and no request waits for it: a router without a scheduler counts for itself.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

SUSPICIONS: Final = "suspicions"
"""Capability of a router: it reads FleetSuspicions."""

SUSPICION_ROWS_MAX: Final = 1024
"""The most losses, and the most cleared fingerprints, in one message."""

Fingerprint = Annotated[bytes, Meta(max_length=64)]


class EngineLoss(msgspec.Struct, frozen=True, array_like=True):
    """The loss of an engine while it processed a request. Times are monotonic seconds.

    The request was sent to `replica_id` at `sent_at_s`; the loss was seen at `lost_at_s`.
    `sent_token` tokens of the whole answer had come before the request was sent, and `lost_token`
    at the loss.
    """

    fingerprint: bytes
    tenant_id: str
    replica_id: str
    sent_at_s: float
    lost_at_s: float
    sent_token: int = 0
    lost_token: int = 0


class FleetLoss(msgspec.Struct, frozen=True, array_like=True):
    """An EngineLoss for other machines, whose clocks differ: it was seen `lost_ago_s` before the
    message was sent, `ran_s` after the request was sent.
    """

    fingerprint: Fingerprint
    tenant_id: Annotated[str, Meta(max_length=256)]
    replica_id: Annotated[str, Meta(max_length=256)]
    lost_ago_s: Annotated[float, Meta(ge=0.0)]
    ran_s: Annotated[float, Meta(ge=0.0)]
    sent_token: int = 0
    lost_token: int = 0


class FleetSuspicions(msgspec.Struct, frozen=True, kw_only=True, tag="fleet_suspicions"):
    """One router's observations: engines lost with a request, and requests that were answered."""

    losses: Annotated[tuple[FleetLoss, ...], Meta(max_length=SUSPICION_ROWS_MAX)] = ()
    cleared: Annotated[tuple[Fingerprint, ...], Meta(max_length=SUSPICION_ROWS_MAX)] = ()
