"""Router to scheduler: demand, usage for accounting, and round trips to nodes."""

from enum import StrEnum

import msgspec

from isochrone.wire.ids import (
    BootId,
    DeploymentId,
    Generation,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
    RequestId,
    RouterId,
    TenantId,
)


class RequestOutcome(StrEnum):
    """How a request ended. Each request has exactly one outcome."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"
    """Refused for lack of capacity, or by the replica because the request is invalid."""


class DemandRow(msgspec.Struct, frozen=True, kw_only=True):
    """The requests for one deployment at one router's PoP over a window, in tokens.

    `uncached_tokens` are prompt tokens that no prefix cache held. `refused` counts the requests
    refused for lack of capacity, and `no_replica` those without any warm replica in the fleet.
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
    """Count, sum and sum of squares of the logarithms of times in ms, for mean and error."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one version of a deployment, by the PoPs of replica (`pop`) and router.

    `asked_pop` is the router's PoP. Routers count this during a rollout. An attempt is one request
    sent to one replica. TTFT is measured from that moment, so that neither the router's queue nor
    earlier failures count against a version.
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
    """One router's demand over one window. (router, boot, seq) identifies it, so repeats are safe.

    `age_s` is the time from the window's end to the sending, by the router's monotonic clock. With
    it, late demand is counted in its own window, whatever the router's wall clock says.
    `table_generation` is the route table that the router serves at the sending, and `table_refusal`
    why it serves no newer one, empty if it follows. `sent_at` is the sending's Unix time by the
    router's wall clock, 0 if its version does not say.
    """

    router_id: RouterId
    boot_id: BootId
    seq: int
    window_s: float
    rows: tuple[DemandRow, ...]
    age_s: float = 0.0
    trials: tuple[TrialRow, ...] = ()
    table_generation: Generation = Generation(0)
    table_refusal: str = ""
    sent_at: float = 0.0


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The usage of one request. `started_at` is Unix time. A request id is counted once.

    gc=False: rows form no reference cycles, and thousands of them wait for their batch.
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
    """A batch of usage, sent until acknowledged. The store counts a repeated batch once."""

    router_id: RouterId
    batch_id: str
    rows: tuple[UsageRow, ...]


class UsageAck(msgspec.Struct, frozen=True, kw_only=True, tag="usage_ack"):
    """The batch is stored, or permanently refused; the router may delete it.

    `refused` counts the rows that a retry would not help, and `reason` says why. An acknowledgement
    of demand has an empty `batch_id`, and the boot id and number of the window, because a router
    may be several processes.
    """

    batch_id: str
    refused: int = 0
    reason: str = ""
    demand_boot: BootId = BootId("")
    demand_seq: int = 0


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """A measured round trip from a router's PoP to a node: a low percentile over the window."""

    node_id: NodeId
    rtt_ms: float


class RoundTrips(msgspec.Struct, frozen=True, kw_only=True, tag="round_trips"):
    """The round trips that one router measured to the nodes of its route table."""

    router_id: RouterId
    rows: tuple[RoundTrip, ...]
