"""The headers that the router adds to a node's request and to a client's response. Pure."""

from collections.abc import Sequence
from email.utils import formatdate
from typing import Final

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.kv.kv_sharing import KV_FOUND, KV_HOLDERS, KV_KEEPER, found_places, parse_found
from isochrone.wire.models.model import Deprecation
from isochrone.wire.peers.adapter import RequestAdapter, format_request_adapter
from router.decide.choice.shared_kv import SharedKvPeers
from router.decide.replicas.ranked_route import RankedRoute
from router.request_context import RequestContext

STREAM_HEADERS: Final = "cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Tells proxies neither to store a stream nor to buffer it."""

# The text between two values, so that a head is one concatenation.
_CONTENT_TYPE: Final = "content-type: "
_REPLICA: Final = f"\r\n{headers.REPLICA}: "
_REQUEST_ID: Final = f"\r\n{headers.REQUEST_ID}: "
_CACHE_SALT: Final = f"\r\n{headers.CACHE_SALT}: "
_PROMPT_TOKENS: Final = f"\r\n{headers.TOKENS}: p="
_PENDING_PREFILL_TOKENS: Final = f"\r\n{headers.PENDING_PREFILL_TOKENS}: "
_PREFILL_MS: Final = f"\r\n{headers.PREFILL_MS}: "
_ROUTER: Final = f"\r\n{headers.ROUTER}: "
_DEADLINE_MS: Final = f"\r\n{headers.DEADLINE_MS}: "
_POP: Final = f"\r\n{headers.POP}: "
_NODE: Final = f"\r\n{headers.NODE}: "
_KV_FOUND: Final = KV_FOUND.encode()
_WHY: Final = f"\r\n{headers.WHY}: "


def node_headers(
    context: RequestContext,
    target: RankedRoute,
    peers: Sequence[PeerReplica],
    readers: Sequence[PeerReplica],
    holders: SharedKvPeers,
    *,
    router: str,
    timeout_s: float,
    sent_at_s: float,
) -> str:
    """Return the header lines of a request to a node.

    `peers` are the replicas that the node may hand the request to, and `readers` those that may
    read its prompt; `holders` may have its prefix. `router` names this start of the router. The
    answer must begin within `timeout_s` of `sent_at_s`.
    """
    request, expected = context.request, context.expected
    generated = context.stream.generated.tokens
    prefill_ms, deadline_ms = int(target.prefill_ms), int(1000 * timeout_s)
    lines = (
        f"{_CONTENT_TYPE}{request.content_type}{_REPLICA}{target.route.replica_id}{_REQUEST_ID}{request.request_id}"
        f"{_CACHE_SALT}{request.tenant_id}"
        f"{_PROMPT_TOKENS}{expected.prompt};o={expected.output}"
        f"{_PENDING_PREFILL_TOKENS}{target.pending_prefill_tokens}{_PREFILL_MS}{prefill_ms}"
        f"{_ROUTER}{router}{_DEADLINE_MS}{deadline_ms}\r\n{request.relayed_headers}"
    )
    if context.trace is not None:
        lines += f"{headers.TRACEPARENT}: {context.trace.traceparent}\r\n"
    elif request.traceparent:
        lines += f"{headers.TRACEPARENT}: {request.traceparent}\r\n"
    if target.queue_tokens_max and context.excluded.may_refuse_for_queue:
        lines += f"{headers.QUEUE_TOKENS_MAX}: {target.queue_tokens_max}\r\n"
    if request.preemptions >= 0:
        lines += f"{headers.PREEMPTIONS}: {request.preemptions}\r\n"
    if request.ttft_ms and not generated:
        left_ms = request.ttft_ms - int(1000 * (sent_at_s - request.arrived_s))
        lines += f"{headers.TTFT_MS}: {max(0, left_ms)}\r\n"
    if request.adapter is not None and request.adapter.artifact is not None:
        named = RequestAdapter(
            adapter_id=request.adapter.adapter_id,
            model_id=request.adapter.model_id,
            artifact=request.adapter.artifact,
            holders=context.adapter_holders,
        )
        lines += f"{headers.ADAPTER}: {format_request_adapter(named)}\r\n"
    if context.is_suspect:
        lines += f"{headers.SUSPECT}: 1\r\n"
    if generated:
        lines += f"{headers.GENERATED_TOKENS}: {generated}\r\n"
    elif peers:
        lines += f"{headers.PEER_REPLICAS}: {format_peer_replicas(peers)}\r\n"
    if readers:
        lines += f"{headers.PREFILL_REPLICAS}: {format_peer_replicas(readers)}\r\n"
    if holders.replicas:
        lines += f"{KV_HOLDERS}: {format_peer_replicas(holders.replicas)}\r\n"
        if holders.keeper:
            lines += f"{KV_KEEPER}: {holders.keeper}\r\n"
    return lines


def client_headers(context: RequestContext, ranked: RankedRoute, rate_limit_lines: str) -> str:
    """Return the header lines of a response: limits, request id, the answering replica and why."""
    route, regions = ranked.route, context.request.regions
    why, attempt = ranked.reason_header, context.attempt
    if attempt is not None and attempt.prefill_id is not None:
        why += f" read-at={attempt.prefill_id}"
    head = attempt.exchange.head if attempt is not None and attempt.exchange is not None else None
    found = head.fields.get(_KV_FOUND) if head is not None else None
    if found:
        counts = parse_found(found.decode("latin-1"))
        for place, tokens in found_places(counts):
            why += f" kv-{place}={tokens}"
    if regions:
        rate_limit_lines += f"{headers.REGIONS}: {', '.join(regions)}\r\n"
    return (
        f"{rate_limit_lines}{headers.REQUEST_ID}: {context.request.client_request_id}"
        f"{_POP}{route.pop}{_NODE}{route.node_id}{_WHY}{why}\r\n"
    )


def deprecation_headers(deprecation: Deprecation) -> dict[str, str]:
    """Return the headers that announce the end of a deployment (RFC 9745 and RFC 8594)."""
    fields = {"deprecation": f"@{deprecation.announced_at}"}
    if deprecation.sunset_at:
        fields["sunset"] = formatdate(deprecation.sunset_at, usegmt=True)
    return fields
