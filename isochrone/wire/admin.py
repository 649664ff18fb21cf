"""What the admin API says: requests and answers, as its OpenAPI document describes them."""

from typing import Annotated

import msgspec

from isochrone.wire.control import PeerRole
from isochrone.wire.ids import (
    COUNTRY_PATTERN,
    END,
    POP_PATTERN,
    DeploymentId,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    TenantId,
)
from isochrone.wire.model import (
    Amount,
    CatalogModel,
    EngineSettings,
    ModelName,
    Name,
    NonNegative,
    PlacementPolicy,
)
from isochrone.wire.report import NodeDevice
from isochrone.wire.routes import KeyLimits

PopName = Annotated[str, msgspec.Meta(pattern=POP_PATTERN)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=30 * 24 * 3600)]


class PopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PoP as an operator writes it."""

    city: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    country: Annotated[str, msgspec.Meta(pattern=COUNTRY_PATTERN)]
    latitude: Annotated[float, msgspec.Meta(ge=-90, le=90)]
    longitude: Annotated[float, msgspec.Meta(ge=-180, le=180)]


class PopView(msgspec.Struct, frozen=True, kw_only=True):
    """A PoP as it stands."""

    pop: PopId
    city: str
    country: str
    latitude: float
    longitude: float
    etag: int


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it stands. `silent_s` is how long ago it was heard; None if never."""

    node_id: NodeId
    pop: PopId
    address: str
    draining: bool
    revoked: bool
    silent_s: float | None
    generation: int
    assigned: int
    devices: tuple[NodeDevice, ...]
    replicas: int
    etag: int
    certificate_serial: str = ""
    certificate_expires_at: float | None = None


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it stands and the route table generation that it has."""

    router_id: str
    pop: PopId
    silent_s: float | None
    generation: int
    revoked: bool
    certificate_serial: str = ""
    certificate_expires_at: float | None = None


class JoinTokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish for a right to join: for one peer or `uses_max`, for any new name or for `name`."""

    pop: PopName
    role: PeerRole = PeerRole.AGENT
    ttl_s: Ttl = 900.0
    name: Name | None = None
    uses_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1


class JoinTokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A join token; `token` is there once, in the answer that made it."""

    token_id: str
    pop: PopId
    role: str
    expires_at: float
    used_by: str | None = None
    token: str | None = None
    name: str | None = None
    uses: int = 0
    uses_max: int = 1


class RevocationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A certificate to refuse, by its serial in hex; without one, all that `name` was issued."""

    role: PeerRole
    name: Name
    serial: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{0,40}}{END}")] = ""
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""


class RevocationView(msgspec.Struct, frozen=True, kw_only=True):
    """What is refused, since when, and why."""

    role: PeerRole
    name: str
    serial: str
    at: float
    reason: str


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue entry as it stands."""

    model: CatalogModel
    etag: int


class DeploymentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment as an operator writes it. `name` is what clients write as `model`."""

    model_id: ModelName
    name: ModelName | None = None
    engine: EngineSettings = EngineSettings()
    policy: PlacementPolicy = PlacementPolicy()


class NewDeploymentBody(DeploymentBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new deployment, with its id."""

    deployment_id: Name


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment as it stands, with how many of its replicas are in each state."""

    deployment_id: DeploymentId
    name: str
    model_id: ModelId
    version: int
    engine: EngineSettings
    policy: PlacementPolicy
    replicas: dict[str, int]
    unmet: tuple[str, ...]
    etag: int


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's seat, its state, and why it is there.

    One over several nodes has a seat on each; all but the leader's name it.
    """

    replica_id: str
    deployment_id: DeploymentId
    version: int
    node_id: NodeId
    pop: PopId
    device_ids: tuple[str, ...]
    memory_bytes: int
    state: str
    state_reason: str
    state_age_s: float
    ending: bool
    ended_reason: str
    reason: str
    restarts: int
    fetched_bytes: int
    leader_id: str = ""


class LimitsBody(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key's limits as an operator writes them: a misspelt one is refused, not ignored."""

    requests_per_min: NonNegative = 0
    tokens_per_min: NonNegative = 0
    concurrency: NonNegative = 0
    tokens_per_day: NonNegative = 0
    spend_per_day: Amount = 0.0


class KeyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key: whose it is, what it may ask for, and how much."""

    tenant_id: Name
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    deployments: tuple[str, ...] = ()
    limits: LimitsBody = LimitsBody()
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; `key` is there once, in the answer that made it.

    Today (UTC) is counted for keys that have a quota.
    """

    key_id: KeyId
    tenant_id: TenantId
    note: str
    deployments: tuple[str, ...]
    limits: KeyLimits
    expires_at: float | None
    revoked: bool
    etag: int
    tokens_today: int = 0
    spend_today: float = 0.0
    key: str | None = None


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """What was used of a deployment, on a day (UTC), or over all days asked where `day` is null.

    Without a `key_id` it is all of the tenant's. Spend is by the prices of today.
    """

    day: str | None
    tenant_id: TenantId
    key_id: str
    deployment_id: DeploymentId
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    spend: float


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet in one answer."""

    cluster_id: str
    scheduler: str
    acting: bool
    acting_scheduler: str
    epoch: int
    generation: int
    route_generation: int
    frozen: str
    pops: int
    nodes: int
    nodes_ready: int
    routers: int
    routers_ready: int
    deployments: int
    replicas: dict[str, int]
    unmet: tuple[str, ...]
