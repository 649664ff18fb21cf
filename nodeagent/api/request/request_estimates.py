"""A router's estimates for a request, as the request's headers carry them."""

from typing import NamedTuple

from aiohttp import web

from isochrone.ttft_order import TTFT_MS_MAX, TtftObjective, ttft_objective
from isochrone.wire.digits import parse_digits
from isochrone.wire.http import headers


class PrefillEstimate(NamedTuple):
    """The router's estimate of a prompt's prefill on one replica; None tokens: the whole prompt."""

    pending_prefill_tokens: int | None
    prefill_ms: int


def prefill_estimate(request: web.Request) -> PrefillEstimate:
    """Return the router's estimate of the prompt's prefill."""
    tokens = read_count(request, headers.PENDING_PREFILL_TOKENS)
    prefill_ms = read_count(request, headers.PREFILL_MS) or 0
    return PrefillEstimate(tokens, prefill_ms)


def queue_tokens_max(request: web.Request) -> int | None:
    """Return the longest queue that the router accepts, in pending prefill tokens."""
    return read_count(request, headers.QUEUE_TOKENS_MAX)


def first_token_objective(request: web.Request, prefill_ms: int, now_s: float) -> TtftObjective:
    """Return by when a request that arrives now needs its first token."""
    return ttft_objective(now_s, ttft_left_ms(request), prefill_ms)


def ttft_left_ms(request: web.Request) -> int | None:
    """Return within how many ms of its arrival here the request needs its first token."""
    left_ms = read_count(request, headers.TTFT_MS)
    return None if left_ms is None else min(left_ms, TTFT_MS_MAX)


def read_count(request: web.Request, header: str) -> int | None:
    """Return a header's number of tokens or milliseconds, or None if it has none."""
    return parse_digits(request.headers.get(header, ""), 12)
