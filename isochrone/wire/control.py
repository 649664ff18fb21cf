"""The control conversation: one WebSocket per agent and per router, dialled outward.

Scheduler: `Challenge`. Peer: `Register`, signed with the key of its certificate. Scheduler:
`Welcome` or `Refused`. Then reports and pulses (or demand and usage) go up, assignments (or route
tables) come down. A standby answers `Refused` with code `not_acting`; the peer tries its next URL.
"""

from enum import StrEnum

import msgspec

from isochrone.wire.assignment import Assignment
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, PopId
from isochrone.wire.report import Pulse, Report
from isochrone.wire.routes import RouteDelta, RouteTable, SnapshotWanted
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck


class PeerRole(StrEnum):
    """Who dials the scheduler."""

    AGENT = "agent"
    ROUTER = "router"


class RefusedCode(StrEnum):
    """Why a peer is turned away at the control door."""

    NOT_ACTING = "not_acting"
    PROTOCOL = "protocol"
    IDENTITY = "identity"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    BUSY = "busy"


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The scheduler's first words: sign this nonce."""

    protocol: int
    cluster_id: ClusterId
    nonce: bytes


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """Who dials, proven by a signature over `register_payload`.

    `name` is the node id or router id in the certificate. `cluster_id` is empty until first known;
    `generation` and `epoch` are the newest the peer has stored.
    """

    protocol: int
    role: PeerRole
    name: str
    pop: PopId
    boot_id: BootId
    certificate_pem: str
    signature: bytes
    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    version: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Registered.

    A peer that loses this conversation dials again after a time of its own between 0 and
    `redial_spread_s`, lest all do so in the same moment.
    """

    cluster_id: ClusterId
    epoch: Epoch
    redial_spread_s: float = 0.0


class RegistrationRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Turned away, in words. The connection closes after it."""

    code: RefusedCode
    reason: str
    retry_after_s: float = 1.0


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """A peer's certificate nears its end: sign one for this key, for whom this conversation is."""

    csr_pem: str


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    """The new certificate, of the same name, role and PoP."""

    certificate_pem: str


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/join`, JSON: a one-time token for a certificate. The key never leaves the peer."""

    token: str
    role: PeerRole
    name: str
    csr_pem: str


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's certificate, the cluster's authority, and the PoP its token was bound to."""

    cluster_id: ClusterId
    name: str
    pop: PopId
    certificate_pem: str
    ca_pem: str


FromAgent = Register | Report | Pulse | Renew
ToAgent = Challenge | Welcome | RegistrationRefused | Assignment | Renewed
FromRouter = Register | Demand | Usage | RoundTrips | SnapshotWanted | Renew
ToRouter = Challenge | Welcome | RegistrationRefused | RouteTable | RouteDelta | UsageAck | Renewed


def register_payload(*, cluster_id: ClusterId, nonce: bytes, name: str, boot_id: BootId) -> bytes:
    """Return the bytes a peer signs to prove that it holds the key of its certificate."""
    return b"isochrone-register-1\0" + msgspec.msgpack.encode((cluster_id, nonce, name, boot_id))
