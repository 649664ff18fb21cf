"""Whether a replica of this node takes a request now: tokens, a seat, the router's own limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Final

from aiohttp import web

from isochrone.wire.engines.engine_capabilities import capabilities_of
from isochrone.wire.http import headers
from nodeagent import metrics
from nodeagent.api.inference_paths import GENERATION_PATHS
from nodeagent.api.request.request_estimates import (
    PrefillEstimate,
    first_token_objective,
    queue_tokens_max,
    read_count,
    ttft_left_ms,
)
from nodeagent.decide.requests.admission import TokenReservation
from nodeagent.decide.requests.preemption import BatchItem
from nodeagent.managed_replica import ManagedReplica

OUTPUT_TOKENS_DEFAULT: Final = 256
"""Output reserved for a request without the router's estimate."""


class RequestRefused(Exception):
    """This node refuses the request; the router may send it to another replica.

    `word` is the refusal's name on the wire.
    """

    def __init__(self, word: str, status: int = 429, load: str = "") -> None:
        super().__init__(word)
        self.word = word
        self.status = status
        self.load = load


def admit(
    request: web.Request, replica: ManagedReplica, body: bytes, estimate: PrefillEstimate
) -> TokenReservation:
    """Reserve the request's tokens on the replica, or raise RequestRefused.

    The cache salt names the tenant.
    """
    tokens = headers.parse_tokens(request.headers.get(headers.TOKENS, ""))
    if tokens is None:
        tokens = headers.TokenEstimate(len(body) // 4 + 1, OUTPUT_TOKENS_DEFAULT)
    reservation = replica.admission.admit(
        tokens.prompt,
        tokens.output,
        estimate.pending_prefill_tokens,
        router=headers.router_name(request.headers),
        generates_for=(
            request.headers.get(headers.CACHE_SALT, "") if needs_seat(request, replica) else None
        ),
        prefill_ms=estimate.prefill_ms,
        now_s=monotonic(),
        item=batch_item(request),
    )
    if reservation is None:
        raise RequestRefused(headers.BUSY, load=load_header(request, replica))
    return reservation


def needs_seat(request: web.Request, replica: ManagedReplica) -> bool:
    """Return True if the engine's limit of concurrent sequences holds for a request."""
    able = capabilities_of(replica.spec.engine.driver)
    return request.path in GENERATION_PATHS or able.limits_all_requests


def batch_item(request: web.Request) -> BatchItem | None:
    """Return the item of a batch that a request is; None for a client's request."""
    preemptions = read_count(request, headers.PREEMPTIONS)
    return None if preemptions is None else BatchItem(preemptions)


@asynccontextmanager
async def until_preempted(
    request: web.Request, replica: ManagedReplica, reservation: TokenReservation
) -> AsyncIterator[None]:
    """End what runs within when the item is preempted, and raise RequestRefused."""
    item = reservation.item
    if item is None:
        yield
        return
    try:
        async with asyncio.timeout(None) as scope:
            loop = asyncio.get_running_loop()
            item.on_preempt(lambda: scope.reschedule(loop.time()))
            yield
            item.keep()
    except TimeoutError:
        if not item.is_preempted:
            raise
        _count_preempted(replica, reservation, item)
        raise RequestRefused(headers.PREEMPTED, load=load_header(request, replica)) from None
    finally:
        item.keep()


def _count_preempted(
    replica: ManagedReplica, reservation: TokenReservation, item: BatchItem
) -> None:
    """Count an item's end and the tokens that were lost with it.

    An answer that is not streamed is counted by the engine's speed, and by at most its length.
    """
    if not item.has_begun:
        metrics.PREEMPTED_ITEMS.labels("waiting").inc()
        return
    speed = replica.profile.decode_tokens_per_s / max(1, replica.admission.running)
    output_tokens = min(reservation.output_tokens, int((monotonic() - item.began_s) * speed))
    metrics.PREEMPTED_ITEMS.labels("running").inc()
    metrics.PREEMPTED_TOKENS.labels("prompt").inc(reservation.prompt_tokens)
    metrics.PREEMPTED_TOKENS.labels("output").inc(output_tokens)


@asynccontextmanager
async def seat(
    request: web.Request,
    replica: ManagedReplica,
    estimate: PrefillEstimate,
    reservation: TokenReservation,
) -> AsyncIterator[None]:
    """Wait for a seat of the engine, which most engines need for generations only."""
    item = reservation.item
    if not needs_seat(request, replica):
        if item is not None:
            item.began_s = monotonic()
        yield
        return
    objective = first_token_objective(request, estimate.prefill_ms, monotonic())
    async with replica.seats.seat(
        request.headers.get(headers.CACHE_SALT, ""),
        objective,
        yields=item is not None or request.headers.get(headers.PRIORITY) == headers.PRIORITY_LOWEST,
        item=item,
    ) as started:
        reservation.on_first_token = started
        yield


def count_objective(request: web.Request, admitted_s: float, now_s: float) -> None:
    """Count whether the first token has come in time, if the request says by when it needs it."""
    left_ms = ttft_left_ms(request)
    if left_ms is not None:
        outcome = "met" if 1000 * (now_s - admitted_s) <= left_ms else "missed"
        metrics.TTFT_OBJECTIVES.labels(outcome).inc()


def check_queue(request: web.Request, replica: ManagedReplica) -> None:
    """Refuse a request if the queue is longer than the router accepts for this replica.

    The refusal carries the current load, with which the router may choose another replica.
    """
    tokens_max = queue_tokens_max(request)
    if tokens_max is None:
        return
    if replica.admission.pending_prefill_tokens(monotonic()) > tokens_max:
        raise RequestRefused(headers.QUEUED, load=load_header(request, replica))


def load_header(request: web.Request, replica: ManagedReplica) -> str:
    """Return the replica's load as a header value for the router that sent the request."""
    return headers.format_load(
        replica.admission.load(headers.router_name(request.headers), monotonic())
    )
