"""What goes with a request to a node, and with an answer to its client: lines of headers. Pure."""

from typing import Final

from isochrone.wire import headers
from router.decide.board import Ranked
from router.decide.pick import Routes
from router.journey import Journey

STREAM_LINES: Final = "cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Nobody on the way may store a stream or hold it back."""

# What stands between two values, so that a head is one joining of texts.
_REPLICA: Final = f"content-type: application/json\r\n{headers.REPLICA}: "
_REQUEST_ID: Final = f"\r\n{headers.REQUEST_ID}: "
_CACHE_SALT: Final = f"\r\n{headers.CACHE_SALT}: "
_PROMPT_TOKENS: Final = f"\r\n{headers.TOKENS}: p="
_UNREAD_TOKENS: Final = f"\r\n{headers.PENDING_PREFILL_TOKENS}: "
_PREFILL_MS: Final = f"\r\n{headers.PREFILL_MS}: "
_ROUTER: Final = f"\r\n{headers.ROUTER}: "
_DEADLINE_MS: Final = f"\r\n{headers.DEADLINE_MS}: "
_POP: Final = f"\r\n{headers.POP}: "
_NODE: Final = f"\r\n{headers.NODE}: "
_WHY: Final = f"\r\n{headers.WHY}: "


def to_node(
    journey: Journey, ranked: Ranked, routes: Routes, router: str, patience_s: float
) -> str:
    """Write what a node is told of a request beside its body."""
    asked = journey.asked
    prompt_tokens, output_tokens = journey.tokens_ahead
    prefill_ms, deadline_ms = int(ranked.prefill_ms), int(1000 * patience_s)
    lines = (
        f"{_REPLICA}{ranked.route.replica_id}{_REQUEST_ID}{asked.request_id}"
        f"{_CACHE_SALT}{asked.key.tenant_id}"
        f"{_PROMPT_TOKENS}{prompt_tokens};o={output_tokens}"
        f"{_UNREAD_TOKENS}{ranked.unread_tokens}{_PREFILL_MS}{prefill_ms}"
        f"{_ROUTER}{router}{_DEADLINE_MS}{deadline_ms}\r\n"
    )
    if ranked.queue_tokens_max and journey.may_be_turned_away:
        lines += f"{headers.QUEUE_TOKENS_MAX}: {ranked.queue_tokens_max}\r\n"
    if journey.said.tokens:
        lines += f"{headers.GENERATED_TOKENS}: {journey.said.tokens}\r\n"
    elif siblings := routes.siblings(ranked):
        lines += f"{headers.PEER_REPLICAS}: {headers.format_peer_replicas(siblings)}\r\n"
    return lines


def to_client(journey: Journey, ranked: Ranked, allowance: str) -> str:
    """Write what a client is told beside its answer: what is left to it, who answers, and why."""
    route = ranked.route
    return (
        f"{allowance}{headers.REQUEST_ID}: {journey.asked.known_as}"
        f"{_POP}{route.pop}{_NODE}{route.node_id}{_WHY}{ranked.why}\r\n"
    )
