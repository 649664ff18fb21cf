"""The HTTP headers between client, router and node, and the load that each answer carries."""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.ids import NodeId, ReplicaId

# Client to router.
SESSION_AFFINITY: Final = "x-session-affinity"
REQUEST_ID: Final = "x-request-id"

API_KEY: Final = "x-api-key"
"""The API key as Anthropic's clients send it, without `Authorization`."""

ANTHROPIC_VERSION: Final = "anthropic-version"
"""Anthropic's clients send it, and no others."""

TRACEPARENT: Final = "traceparent"
"""The client's position in its trace, as W3C Trace Context defines it."""

PRIORITY: Final = "x-isochrone-priority"
PRIORITY_DEFAULT: Final = 50
"""The priority of a request without the header, and the highest that a client may give: a higher
one would put it before the requests of other tenants. Engines accept up to 100."""

PRIORITY_LOWEST: Final = "0"
"""The priority of items of batches and of flexible requests (`service_tier: flex`)."""

TTFT_MS: Final = "x-isochrone-ttft-ms"
"""The time in ms within which the client needs the first token. A router sends a node the time that
is left, at least 0. It orders a tenant's requests that wait at a replica."""

# Router to client.
POP: Final = "x-isochrone-pop"
NODE: Final = "x-isochrone-node"
WHY: Final = "x-isochrone-why"

REGIONS: Final = "x-isochrone-regions"
"""The regions that the request's key is limited to; absent if it is not."""

# Router to node.
REPLICA: Final = "x-isochrone-replica"
CACHE_SALT: Final = "x-isochrone-cache-salt"
"""The tenant's id. The node sends the engine a salt that it computes from it with a secret."""

TOKENS: Final = "x-isochrone-tokens"
DEADLINE_MS: Final = "x-isochrone-deadline-ms"
PENDING_PREFILL_TOKENS: Final = "x-isochrone-pending-prefill-tokens"
"""The prompt's tokens that the replica's prefix cache does not hold, as the router estimates."""

PREFILL_MS: Final = "x-isochrone-prefill-ms"
"""The time that the replica needs to prefill them, as the router estimates."""

ROUTER: Final = "x-isochrone-router"
"""A name of this run of the router. The load in the answer then separates the requests of other
routers from its own."""

PREEMPTIONS: Final = "x-isochrone-preemptions"
"""The request is an item of a batch that was preempted this many times. A node may preempt it."""

QUEUE_TOKENS_MAX: Final = "x-isochrone-queue-tokens-max"
"""The longest queue, in pending prefill tokens, that the router accepts at the replica."""

PEER_REPLICAS: Final = "x-isochrone-peer-replicas"
"""The replicas of the PoP that could serve the request, beginning with the addressed one."""

PEER_REPLICAS_MAX: Final = 4

PREFILL_REPLICAS: Final = "x-isochrone-prefill-replicas"
"""The replicas of the PoP that could read the prompt for the addressed one, which comes first."""

ADAPTER: Final = "x-isochrone-adapter"
"""The LoRA adapter that the request names (`adapter.format_request_adapter`)."""

SUSPECT: Final = "x-isochrone-suspect"
"""An engine failed while it processed this request: try it while no other such request is tried."""

GENERATED_TOKENS: Final = "x-isochrone-generated-tokens"
"""The tokens of this answer that the client already has: the request resumes the answer."""

# Node to router.
RESUMED: Final = "x-isochrone-resumed"
"""The answer resumes after the generated tokens; without this header it starts over. The value says
which sampling continues exactly: INEXACT (none), GREEDY, or SEEDED (greedy and seeded)."""

PROMPT_TOKENS: Final = "x-isochrone-prompt-tokens"
"""How many tokens the prompt of a stream has, as its engine counts: a client may disconnect before
the usage comes."""

INEXACT: Final = "inexact"
GREEDY: Final = "greedy"
SEEDED: Final = "seeded"

LOAD: Final = "x-isochrone-load"
LOADS: Final = "x-isochrone-loads"
"""The load of every warm replica of a node, in the answer to a ping."""

LOADS_MAX: Final = 64

ADAPTERS: Final = "x-isochrone-adapters"
"""In the answer to such a request: the adapters that the replica has loaded."""

LOAD_FIELDS_MAX: Final = 16
"""Fields of a load that are read; names that this release does not know are skipped."""

HANDOFF_REPLICA: Final = "x-isochrone-handoff-replica"
"""The peer replica that answers instead of the addressed one."""

READ_AT: Final = "x-isochrone-read-at"
"""Node to node, in the answer to a handed-off request: the prefill replica that read its prompt."""

PREFILL_REPLICA: Final = "x-isochrone-prefill-replica"
"""The replica that reads the prompt: a prefill replica, or again the addressed one."""

REFUSED: Final = "x-isochrone-refused"
"""The word for why a node refuses a request."""

ENGINE_LOST: Final = "x-isochrone-engine-lost"
"""The engine failed while it processed this request, which may be the cause."""

ENGINE_LOST_CODE: Final = "engine_lost"
"""The same as the code of an error event, in a stream that had begun."""

CANNOT_RESUME: Final = "cannot_resume"
"""Refusal: the replica's engine cannot resume an answer."""

BUSY: Final = "busy"
"""Refusal: the replica cannot take another request."""

PREEMPTED: Final = "preempted"
"""Refusal: a client's request took the place of this item of a batch."""

QUEUED: Final = "queued"
"""Refusal: the replica's queue is longer than QUEUE_TOKENS_MAX."""

# Node to node.
FETCHED_BYTES: Final = "x-isochrone-fetched-bytes"
"""The bytes of an artifact that the node has, while it is still fetching it."""


ROUTER_NAME_BYTES_MAX: Final = 64


def router_name(sent: Mapping[str, str]) -> str:
    """Return the name of the router that sent a request, "" if it sent none."""
    return sent.get(ROUTER, "")[:ROUTER_NAME_BYTES_MAX]


class PeerReplica(msgspec.Struct, frozen=True):
    """A replica of a PoP that could serve a request, as the router estimates it.

    The node at `address` must prove to be `node_id`. The replica would prefill
    `pending_prefill_tokens` of this prompt, at `token_us` each, after as much for each token that
    is queued before it. For the choice between replicas its prefill counts as `prefill_ms`: in
    PEER_REPLICAS that has the router's congestion charge, too.
    """

    replica_id: ReplicaId
    node_id: NodeId
    address: str
    pending_prefill_tokens: int
    prefill_ms: int
    token_us: int

    @property
    def expected_prefill_ms(self) -> int:
        """The time that the replica needs to prefill the prompt, as the router estimates."""
        return round(self.pending_prefill_tokens * self.token_us / 1000)

    @property
    def estimate_headers(self) -> dict[str, str]:
        """The headers with which a node sends it a request and the estimates for it."""
        return {
            REPLICA: self.replica_id,
            PENDING_PREFILL_TOKENS: str(self.pending_prefill_tokens),
            PREFILL_MS: str(self.expected_prefill_ms),
        }


class ReportedLoad(msgspec.Struct, frozen=True):
    """A replica's load as each answer carries it: tokens in flight and requests, by phase.

    `pending_prefill_tokens` are the prompt tokens still to be prefilled, less what routers expect
    in the prefix cache. The unit is the cost of a token at the start of a prompt: later tokens take
    longer and count for more. `others_pending_prefill_tokens` and `others_decode_tokens` leave out
    the requests of the router that gets this answer, and the estimated progress on the current
    prompt. The prefix cache has lost the blocks last used more than `cache_age_ms` ago, and still
    has the others. -1 means that the node does not report the value. A replica that sleeps needs
    `wake_ms` before it can serve. Only answers to pings have `sequences_max`, the number of
    requests that the engine runs at once, `sequence_ms`, after which one of them ends when it runs
    that many, `batch_items`, the requests of batches among `running`, and `prefill_ns_per_token`,
    how long the replica has taken lately to read a token of those pending; 0 if that is unknown.
    """

    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    pending_prefill_tokens: int = -1
    others_pending_prefill_tokens: int = -1
    others_decode_tokens: int = -1
    wake_ms: int = 0
    cache_age_ms: int = -1
    sequences_max: int = 0
    sequence_ms: int = 0
    batch_items: int = 0
    prefill_ns_per_token: int = 0


class TokenEstimate(NamedTuple):
    """A router's estimate of a request's prompt and output tokens."""

    prompt: int
    output: int


def format_load(load: ReportedLoad) -> str:
    """Format a load as a header value: `p=120;d=64;r=2;w=0;u=40;o=30;e=50`."""
    value = f"p={load.prefill_tokens};d={load.decode_tokens};r={load.running};w={load.waiting}"
    if load.pending_prefill_tokens >= 0:
        value += f";u={load.pending_prefill_tokens}"
    if load.others_pending_prefill_tokens >= 0:
        value += f";o={load.others_pending_prefill_tokens};e={load.others_decode_tokens}"
    if load.wake_ms:
        value += f";z={load.wake_ms}"
    if load.cache_age_ms >= 0:
        value += f";c={load.cache_age_ms}"
    if load.sequences_max:
        value += f";s={load.sequences_max}"
    if load.sequence_ms:
        value += f";t={load.sequence_ms}"
    if load.batch_items:
        value += f";b={load.batch_items}"
    if load.prefill_ns_per_token:
        value += f";k={load.prefill_ns_per_token}"
    return value


_USUAL_LOAD: Final = re.compile(
    r"p=(\d{1,15});d=(\d{1,15});r=(\d{1,15});w=(\d{1,15})"
    r"(?:;u=(\d{1,15}))?(?:;o=(\d{1,15});e=(\d{1,15}))?(?:;z=(\d{1,15}))?(?:;c=(\d{1,15}))?"
    r"(?:;s=(\d{1,15}))?(?:;t=(\d{1,15}))?(?:;b=(\d{1,15}))?"
    r"(?:;k=(\d{1,15}))?",
    re.ASCII,
)
"""A load as `format_load` writes it. A router of a large fleet reads 20,000 of them a second."""


def parse_load(value: str) -> ReportedLoad | None:
    """Parse a header value; return None if it is malformed: the answer is still usable."""
    if (usual := _USUAL_LOAD.fullmatch(value)) is not None:
        p, d, r, w, u, o, e, z, c, s, t, b, k = usual.groups()
        return ReportedLoad(
            int(p),
            int(d),
            int(r),
            int(w),
            int(u) if u else -1,
            int(o) if o else -1,
            int(e) if e else -1,
            int(z) if z else 0,
            int(c) if c else -1,
            int(s) if s else 0,
            int(t) if t else 0,
            int(b) if b else 0,
            int(k) if k else 0,
        )
    fields: dict[str, int] = {}
    for part in value.split(";", LOAD_FIELDS_MAX)[:LOAD_FIELDS_MAX]:
        name, equals, number = part.partition("=")
        count = parse_digits(number, 15)
        if not equals or count is None:
            return None
        fields[name] = count
    try:
        load = ReportedLoad(
            fields["p"],
            fields["d"],
            fields["r"],
            fields["w"],
            fields.get("u", -1),
            wake_ms=fields.get("z", 0),
            cache_age_ms=fields.get("c", -1),
            sequences_max=fields.get("s", 0),
            sequence_ms=fields.get("t", 0),
            batch_items=fields.get("b", 0),
            prefill_ns_per_token=fields.get("k", 0),
        )
    except KeyError:
        return None
    if "o" not in fields or "e" not in fields:
        return load
    return msgspec.structs.replace(
        load, others_pending_prefill_tokens=fields["o"], others_decode_tokens=fields["e"]
    )


def format_loads(loads: Mapping[ReplicaId, ReportedLoad]) -> str:
    """Format loads by replica as a header value: `r1 p=120;d=64;r=2;w=0;u=40,r2 ...`."""
    first_loads = islice(loads.items(), LOADS_MAX)
    return ",".join(f"{replica_id} {format_load(load)}" for replica_id, load in first_loads)


def parse_loads(value: str) -> dict[ReplicaId, ReportedLoad]:
    """Parse a header value; skip malformed entries."""
    loads = {}
    for part in value.split(",", LOADS_MAX)[:LOADS_MAX]:
        replica_id, _, text = part.partition(" ")
        load = parse_load(text)
        if load is not None:
            loads[ReplicaId(replica_id)] = load
    return loads


def parse_peer_replicas(value: str) -> list[PeerReplica]:
    """Parse a header value (`replica_list.format_peer_replicas`); skip malformed entries."""
    replicas = []
    for part in value.split(",", PEER_REPLICAS_MAX)[:PEER_REPLICAS_MAX]:
        fields = part.split(" ")
        if len(fields) != 6 or not fields[0]:
            continue
        replica_id, node_id, address = fields[:3]
        tokens, prefill_ms, token_us = (parse_digits(field, 12) for field in fields[3:])
        if tokens is None or prefill_ms is None or token_us is None:
            continue
        replicas.append(
            PeerReplica(
                ReplicaId(replica_id), NodeId(node_id), address, tokens, prefill_ms, token_us
            )
        )
    return replicas


def parse_tokens(value: str) -> TokenEstimate | None:
    """Parse a header value `p=120;o=64`; return None if it is malformed."""
    prompt, _, output = value.removeprefix("p=").partition(";o=")
    prompt_tokens, output_tokens = parse_digits(prompt, 12), parse_digits(output, 12)
    if prompt_tokens is None or output_tokens is None:
        return None
    return TokenEstimate(prompt_tokens, output_tokens)
