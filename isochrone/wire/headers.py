"""The HTTP headers between client, router and node, and the load that each answer carries back."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from isochrone.wire.ids import NodeId, ReplicaId

# Client to router.
SESSION_AFFINITY: Final = "x-session-affinity"
REQUEST_ID: Final = "x-request-id"

# Router to client.
POP: Final = "x-isochrone-pop"
NODE: Final = "x-isochrone-node"
WHY: Final = "x-isochrone-why"

# Router to node.
REPLICA: Final = "x-isochrone-replica"
CACHE_SALT: Final = "x-isochrone-cache-salt"
TOKENS: Final = "x-isochrone-tokens"
DEADLINE_MS: Final = "x-isochrone-deadline-ms"
PENDING_PREFILL_TOKENS: Final = "x-isochrone-unread-tokens"
PREFILL_MS: Final = "x-isochrone-prefill-ms"
"""How long the replica is thought to read what is not cached of the prompt."""

ROUTER: Final = "x-isochrone-router"
"""A name of this life of the router: a load tells it what is there of others."""

QUEUE_TOKENS_MAX: Final = "x-isochrone-queue-tokens-max"
PEER_REPLICAS: Final = "x-isochrone-siblings"
"""Who in the PoP might take the request, first of all whom it is sent to: where, and how soon."""

PRIORITY: Final = "x-isochrone-priority"
GENERATED_TOKENS: Final = "x-isochrone-said"
"""How many tokens of this answer the client has already: the request asks for the rest."""

# Node to router.
RESUMED: Final = "x-isochrone-resumed"
"""The answer goes on from what was said; without it, it would begin anew. Its value says which
draws the engine takes up again where they were: GREEDY ones, or SEEDED ones too."""

CANNOT_RESUME: Final = "cannot_resume"
"""The refusal by which a node says that its engine cannot go on from a text."""

QUEUED: Final = "queued"
"""The refusal by which a node says that more waits there than the router chose it by."""

GREEDY: Final = "greedy"
SEEDED: Final = "seeded"

LOAD: Final = "x-isochrone-load"
LOADS: Final = "x-isochrone-loads"
"""Of every warm replica of a node, in the answer to a ping: its id and its load."""

LOADS_MAX: Final = 64

HANDOFF_REPLICA: Final = "x-isochrone-passed"
"""Which sibling answers in place of the replica asked."""

PEER_REPLICAS_MAX: Final = 4

REFUSED: Final = "x-isochrone-refused"

# Node to node: how much of an artifact is here, while it is still being fetched.
FETCHED_BYTES: Final = "x-isochrone-fetched-bytes"


class PeerReplica(msgspec.Struct, frozen=True):
    """A replica of a PoP that might take a request, as the router sees it.

    The node at `address` must prove that it is `node_id`. Of this prompt there are `pending_prefill_tokens`
    to be read there, in `prefill_ms`; of those before it each takes `token_us`.
    """

    replica_id: ReplicaId
    node_id: NodeId
    address: str
    pending_prefill_tokens: int
    prefill_ms: int
    token_us: int


class ReportedLoad(msgspec.Struct, frozen=True):
    """A replica's load as told with each answer: tokens in flight and requests, by phase.

    `unread` is what is still to be read of the prompts, by the routers' word on what is cached, in
    tokens at a prompt's beginning: deeper ones count for more, as they take longer; -1 where a node
    does not tell. `others_pending_prefill_tokens` and `others_decode_tokens` are what there is of others than
    the router told, of the prompt being read only what is left; -1 likewise.
    """

    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    pending_prefill_tokens: int = -1
    others_pending_prefill_tokens: int = -1
    others_decode_tokens: int = -1


def format_load(load: ReportedLoad) -> str:
    """Write `load` as a header value: `p=120;d=64;r=2;w=0;u=40`."""
    told = f"p={load.prefill_tokens};d={load.decode_tokens};r={load.running};w={load.waiting}"
    if load.pending_prefill_tokens >= 0:
        told += f";u={load.pending_prefill_tokens}"
    return (
        told
        if load.others_pending_prefill_tokens < 0
        else f"{told};o={load.others_pending_prefill_tokens};e={load.others_decode_tokens}"
    )


def parse_load(value: str) -> ReportedLoad | None:
    """Read a header value; None where it is not one of ours, for the answer matters more."""
    fields: dict[str, int] = {}
    for part in value.split(";", 8)[:8]:
        name, equals, number = part.partition("=")
        if not equals or not number.isascii() or not number.isdigit() or len(number) > 15:
            return None
        fields[name] = int(number)
    try:
        told = ReportedLoad(fields["p"], fields["d"], fields["r"], fields["w"], fields.get("u", -1))
    except KeyError:
        return None
    if "o" not in fields or "e" not in fields:
        return told
    return msgspec.structs.replace(
        told, others_pending_prefill_tokens=fields["o"], others_decode_tokens=fields["e"]
    )


def format_loads(loads: Mapping[ReplicaId, ReportedLoad]) -> str:
    """Write loads by replica as a header value: `r1 p=120;d=64;r=2;w=0;u=40,r2 ...`."""
    some = islice(loads.items(), LOADS_MAX)
    return ",".join(f"{replica_id} {format_load(load)}" for replica_id, load in some)


def parse_loads(value: str) -> dict[ReplicaId, ReportedLoad]:
    """Read a header value; what in it is not one of ours is left out."""
    loads = {}
    for part in value.split(",", LOADS_MAX)[:LOADS_MAX]:
        replica_id, _, told = part.partition(" ")
        load = parse_load(told)
        if load is not None:
            loads[ReplicaId(replica_id)] = load
    return loads


def format_peer_replicas(siblings: Sequence[PeerReplica]) -> str:
    """Write siblings as a header value: `r1 n1 10.0.0.1:7000 400 120 62,r2 ...`."""
    return ",".join(
        f"{one.replica_id} {one.node_id} {one.address}"
        f" {one.pending_prefill_tokens} {one.prefill_ms} {one.token_us}"
        for one in siblings[:PEER_REPLICAS_MAX]
    )


def parse_peer_replicas(value: str) -> list[PeerReplica]:
    """Read a header value; what in it is not one of ours is left out."""
    siblings = []
    for part in value.split(",", PEER_REPLICAS_MAX)[:PEER_REPLICAS_MAX]:
        name, *told = part.split(" ")
        if name and len(told) == 5 and all(_is_count(number) for number in told[2:]):
            counts = (int(number) for number in told[2:])
            siblings.append(PeerReplica(ReplicaId(name), NodeId(told[0]), told[1], *counts))
    return siblings


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= 12


def parse_tokens(value: str) -> tuple[int, int] | None:
    """Read (prompt tokens, output tokens) as the router estimates them: `p=120;o=64`."""
    prompt, _, output = value.partition(";o=")
    prompt = prompt.removeprefix("p=")
    return (int(prompt), int(output)) if _is_count(prompt) and _is_count(output) else None
