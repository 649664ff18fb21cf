"""The control protocol: one WebSocket connection from each agent and each router to a scheduler.

The scheduler sends `Challenge`. The peer sends `Register`, signed with the key of its certificate.
The scheduler answers `Welcome` or `RegistrationRefused`. Then an agent sends reports and pulses and
receives assignments; a router sends demand and usage and receives route tables. A standby scheduler
refuses with code `not_acting`, and the peer tries its next URL.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from isochrone.wire.client_keys.key_use import FleetKeyUse
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, PopId
from isochrone.wire.peers.assignment import Assignment
from isochrone.wire.peers.report import Pulse, Report
from isochrone.wire.peers.routes import RouteDelta, RouteTable, RouteTablePart, SnapshotWanted
from isochrone.wire.peers.suspicions import FleetSuspicions
from isochrone.wire.peers.usage import Demand, RoundTrips, Usage, UsageAck

Release = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[ -~]*$")]
"""A version of Isochrone. The scheduler stores it, and Postgres has no text with a null."""

TABLE_PARTS: Final = "table_parts"
"""Capability of a router: it takes whole tables in parts, and reports the generation it serves."""

KEYS_FIRST: Final = "keys_first"
"""Capability of a router: it takes a table of keys alone (`RouteTable.keys_only`), which a
scheduler publishes while it cannot know the routes yet."""


class PeerRole(StrEnum):
    """The kind of peer that connects to a scheduler."""

    AGENT = "agent"
    ROUTER = "router"


def join_token_command(role: PeerRole, pop: str = "POP", name: str = "") -> str:
    """Return the command that makes a join token for such a peer, for messages to operators."""
    options = [f"--name {name}"] if name else []
    options += ["--role router"] if role is PeerRole.ROUTER else []
    return " ".join(["isochrone nodes join-token", pop, *options])


class RefusedCode(StrEnum):
    """Why a scheduler refuses a peer."""

    NOT_ACTING = "not_acting"
    PROTOCOL = "protocol"
    IDENTITY = "identity"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    BUSY = "busy"


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    """The scheduler's first message: a nonce for the peer to sign."""

    protocol: int
    cluster_id: ClusterId
    nonce: bytes


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """The peer's identity, proven by a signature over `register_payload`.

    `name` is the node id or router id in the certificate. `cluster_id` is empty until the
    peer knows it. `generation` and `epoch` are the newest that the peer has stored. `capabilities`
    names what this peer's version can read beyond the protocol's first release. `last_error` is why
    its previous connection ended, empty if it is the first.
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
    version: Release = ""
    capabilities: tuple[str, ...] = ()
    last_error: str = ""
    keys_held: bytes = b""
    """The sums of the keys that a router has (`key_sums.py`): it is sent only those that differ."""


class CacheSaltSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The secret from which nodes compute the cache salts of tenants (32 bytes), and its number."""

    version: int
    secret: bytes

    def __repr__(self) -> str:
        # Messages may be logged, the secret must not be.
        return f"CacheSaltSecret(version={self.version})"


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The peer is registered.

    A peer that loses this connection reconnects after a random time between 0 and
    `redial_spread_s`, so that not all peers reconnect at once. Only agents get `cache_salt`.
    """

    cluster_id: ClusterId
    epoch: Epoch
    redial_spread_s: float = 0.0
    relay_token: str = ""
    """With it a router uses what is stored for clients while it is connected, and an agent fetches
    adapters that they have uploaded; "" if it cannot."""
    has_batches: bool = True
    """Whether files and batches are stored: the operator has set a folder for them."""
    cache_salt: CacheSaltSecret | None = None


class RegistrationRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The peer is refused, for `reason`. The scheduler then closes the connection."""

    code: RefusedCode
    reason: str
    retry_after_s: float = 1.0


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """A request for a new certificate, with the key in the CSR and this connection's identity."""

    csr_pem: str


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    """The new certificate, with the same name, role and PoP."""

    certificate_pem: str


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/join` (JSON): a join token for a certificate. The private key stays on the peer."""

    token: str
    role: PeerRole
    name: str
    csr_pem: str


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's certificate, the cluster's CA certificate, and the PoP of the join token."""

    cluster_id: ClusterId
    name: str
    pop: PopId
    certificate_pem: str
    ca_pem: str


FromAgent = Register | Report | Pulse | Renew
ToAgent = Challenge | Welcome | RegistrationRefused | Assignment | Renewed
FromRouter = (
    Register | Demand | Usage | RoundTrips | SnapshotWanted | FleetSuspicions | FleetKeyUse | Renew
)
ToRouter = (
    Challenge
    | Welcome
    | RegistrationRefused
    | RouteTable
    | RouteTablePart
    | RouteDelta
    | UsageAck
    | FleetSuspicions
    | FleetKeyUse
    | Renewed
)


def register_payload(*, cluster_id: ClusterId, nonce: bytes, name: str, boot_id: BootId) -> bytes:
    """Return the bytes that a peer signs to prove that it has the key of its certificate."""
    return b"isochrone-register-1\0" + msgspec.msgpack.encode((cluster_id, nonce, name, boot_id))
