"""Router to scheduler: what was asked for (`Demand`), used (`Usage`), and how far nodes are."""

from enum import StrEnum

import msgspec

from isochrone.wire.ids import (
    BootId,
    DeploymentId,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
    RequestId,
    RouterId,
    TenantId,
)


class RequestOutcome(StrEnum):
    """How a request ended; each has exactly one."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"
    """For want of room, or by the replica for what the client wrote."""


class DemandRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens asked of one deployment in one city over a window. The city is the router's PoP.

    `uncached_tokens` are prompt tokens no prefix cache held; `refused` counts requests turned away
    for want of capacity, `no_replica` those for which nothing warm existed anywhere.
    """

    deployment_id: DeploymentId
    pop: PopId
    requests: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0
    no_replica: int = 0


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of times in ms, added up: enough for a mean and its error."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one version of a deployment did in one PoP (`pop`) for one city (`asked_pop`).

    Routers count this while a rollout is on its way. An attempt is one replica asked; TTFT is from
    that moment on, so that neither queues here nor earlier failures count against a version.
    """

    deployment_id: DeploymentId
    version: int
    pop: PopId
    asked_pop: PopId
    attempts: int = 0
    failures: int = 0
    ttft: Moments = Moments()
    itl: Moments = Moments()


class Demand(msgspec.Struct, frozen=True, kw_only=True, tag="demand"):
    """One router's demand over one window; (router, boot, seq) makes a repeat harmless.

    `age_s` is how long ago the window ended when this was sent, by the router's monotonic clock:
    what comes late is counted where it belongs, whatever the router's wall clock says.
    """

    router_id: RouterId
    boot_id: BootId
    seq: int
    window_s: float
    rows: tuple[DemandRow, ...]
    age_s: float = 0.0
    trials: tuple[TrialRow, ...] = ()


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request used. `started_at` is Unix time; a request id is counted once.

    It can be in no cycle, so the collector is spared the thousands that wait for their batch.
    """

    request_id: RequestId
    key_id: KeyId
    tenant_id: TenantId
    deployment_id: DeploymentId
    pop: PopId
    node_id: NodeId
    replica_id: ReplicaId
    started_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: RequestOutcome
    ttft_ms: float = 0.0
    duration_ms: float = 0.0


class Usage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """A batch of usage, sent until acknowledged: at least once on the wire, once in the store."""

    router_id: RouterId
    batch_id: str
    rows: tuple[UsageRow, ...]


class UsageAck(msgspec.Struct, frozen=True, kw_only=True, tag="usage_ack"):
    """The batch is in the store, or refused for good; the router may forget it.

    `refused` counts the rows that no retry can mend, `reason` says why. An answer to demand has an
    empty `batch_id`, and the boot and number of the window: one router may be several processes.
    """

    batch_id: str
    refused: int = 0
    reason: str = ""
    demand_boot: BootId = BootId("")
    demand_seq: int = 0


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """Measured round trip from a router's PoP to a node, a low percentile over the window."""

    node_id: NodeId
    rtt_ms: float


class RoundTrips(msgspec.Struct, frozen=True, kw_only=True, tag="round_trips"):
    """What one router measured to the nodes of the route table."""

    router_id: RouterId
    rows: tuple[RoundTrip, ...]
