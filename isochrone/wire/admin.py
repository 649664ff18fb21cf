"""Request and response bodies of the admin API. Its OpenAPI document is generated from them."""

from typing import Annotated, Literal

import msgspec

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
from isochrone.wire.models.model import (
    Amount,
    CatalogModel,
    Deprecation,
    EngineSettings,
    ModelName,
    Name,
    NonNegative,
    PlacementPolicy,
)
from isochrone.wire.peers.adapter import AdapterName
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import NodeDevice
from isochrone.wire.peers.routes import KeyLimits

PopName = Annotated[str, msgspec.Meta(pattern=POP_PATTERN)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=30 * 24 * 3600)]


class PopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a PoP."""

    city: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    country: Annotated[str, msgspec.Meta(pattern=COUNTRY_PATTERN)]
    latitude: Annotated[float, msgspec.Meta(ge=-90, le=90)]
    longitude: Annotated[float, msgspec.Meta(ge=-180, le=180)]


class PopView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a PoP."""

    pop: PopId
    city: str
    country: str
    latitude: float
    longitude: float
    etag: int


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a node.

    `silent_s` is the time since its last message, None if there was none; `release` is the version
    of Isochrone with which it registered last, empty if it never has.
    """

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
    release: str = ""
    certificate_serial: str = ""
    certificate_expires_at: float | None = None


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a router.

    `generation` is that of its route table; `silent_s` and `release` are as in NodeView.
    """

    router_id: str
    pop: PopId
    silent_s: float | None
    generation: int
    revoked: bool
    release: str = ""
    certificate_serial: str = ""
    certificate_expires_at: float | None = None


class JoinTokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a join token: for `uses_max` peers with new names, or for `name`."""

    pop: PopName
    role: PeerRole = PeerRole.AGENT
    ttl_s: Ttl = 900.0
    name: Name | None = None
    uses_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1


class JoinTokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A join token. `token` is present only in the response that created it."""

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
    """A certificate to revoke, by its serial in hex; without a serial, all those of `name`.

    A name that the database does not know is refused without `may_be_unknown`, and so is a serial
    that is not that of the certificate used last.
    """

    role: PeerRole
    name: Name
    serial: Annotated[str, msgspec.Meta(pattern=f"^[0-9A-Fa-f]{{0,40}}{END}")] = ""
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""
    may_be_unknown: bool = False


class RevocationView(msgspec.Struct, frozen=True, kw_only=True):
    """A revocation: which certificates, since when (Unix time), and why."""

    role: PeerRole
    name: str
    serial: str
    at: float
    reason: str


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a catalogue entry.

    `signed_by` is the name of the scheduler's key of `model_signers` that has signed its files.
    """

    model: CatalogModel
    etag: int
    signed_by: str = ""


class DeploymentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a deployment. `name` is what clients send as `model`."""

    model_id: ModelName
    name: ModelName | None = None
    engine: EngineSettings = EngineSettings()
    policy: PlacementPolicy = PlacementPolicy()
    deprecation: Deprecation | None = None


class NewDeploymentBody(DeploymentBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a new deployment, with its id."""

    deployment_id: Name


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a deployment. `replicas` counts its replicas by state."""

    deployment_id: DeploymentId
    name: str
    model_id: ModelId
    version: int
    engine: EngineSettings
    policy: PlacementPolicy
    replicas: dict[str, int]
    unmet: tuple[str, ...]
    etag: int
    deprecation: Deprecation | None = None


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of a replica: node, devices, state and reasons.

    A replica over several nodes has a placement on each; all but the leader's have `leader_id`.
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
    role: str = "unified"


class LimitsBody(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a key's limits. A misspelt limit is refused, not ignored."""

    requests_per_min: NonNegative = 0
    tokens_per_min: NonNegative = 0
    concurrency: NonNegative = 0
    tokens_per_day: NonNegative = 0
    spend_per_day: Amount = 0.0
    tokens_per_month: NonNegative = 0
    spend_per_month: Amount = 0.0


class TenantBudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a tenant above those of its keys, and what it has used.

    The counts of today and of this month (UTC) are kept only for budgets per day or per month.
    """

    tenant_id: TenantId
    key_id: KeyId
    limits: KeyLimits
    etag: int
    tokens_today: int = 0
    spend_today: float = 0.0
    tokens_this_month: int = 0
    spend_this_month: float = 0.0


class DeletedTenantView(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a tenant was deleted, and how many keys were revoked (with its budget)."""

    tenant_id: TenantId
    keys: int
    files: int
    batches: int
    responses: int
    conversations: int
    adapters: int


class KeyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a new key: its tenant, the deployments it may use, and its limits.

    `deployments` are ids or names; the key keeps the ids, and empty is all of them.
    `regions` are the PoPs or countries where its requests may be processed; empty for all.
    """

    tenant_id: Name
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    deployments: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    limits: LimitsBody = LimitsBody()
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. `key` is present only in the response that created it.

    The counts of today (UTC) are kept only for keys with a daily quota.
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
    regions: tuple[str, ...] = ()


class NewAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a tenant's LoRA adapter. `model` is the name of a deployment."""

    tenant_id: Name
    model: ModelName
    name: AdapterName
    description: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    public: bool = False


class AdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body that lets all tenants use an adapter, or its own tenant alone."""

    public: bool


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter. `model` is the name of the deployment that its tenant gave.

    An adapter is `incomplete` until it has both of its files; `missing_files` are those it lacks.
    `nodes` are the first of the `nodes_total` nodes that have its files on disk.
    """

    adapter_id: str
    tenant_id: TenantId
    name: str
    description: str
    model: str
    model_id: ModelId
    public: bool
    state: Literal["incomplete", "complete"]
    missing_files: tuple[str, ...]
    rank: int
    size_bytes: int
    digest: str | None
    nodes_total: int
    nodes: tuple[NodeId, ...]
    created_at: float
    modified_at: float
    etag: int


class TenantAdaptersView(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's uploads, and the limits of each tenant (`[adapters]` of schedulers)."""

    tenant_id: TenantId
    adapters: int
    adapters_max: int
    size_bytes: int
    file_bytes_max: int
    rank_max: int


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a deployment on one day (UTC), or over all requested days if `day` is null.

    An empty `key_id` means all keys of the tenant. Spend is computed with current prices.
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
    """The state of the whole fleet. `unmet` says what differs from the desired state.

    `not_following` lists the routers that do not serve the current routes and keys, and the nodes
    that have not taken their assignment, with the reason. Listed routers and nodes do not count as
    ready. `clocks` lists the connected peers whose clocks differ by more than a minute from the
    acting scheduler's. `release` is that of the answering scheduler, `releases` how many nodes and
    routers have registered with each.
    """

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
    not_following: tuple[str, ...] = ()
    clocks: tuple[str, ...] = ()
    release: str = ""
    releases: dict[str, int] = {}
