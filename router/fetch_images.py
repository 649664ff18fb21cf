"""The step of a request that fetches the images it links to, before a replica is chosen."""

from collections.abc import Callable

from isochrone.wire.errors import ApiError
from router.decide.admission.body_limits import AnsweredBodies
from router.recording.trace_spans import RequestTracer
from router.request_context import OUTCOME_REFUSED, RequestContext


async def fetch_images(
    context: RequestContext,
    bodies: AnsweredBodies,
    tracer: RequestTracer | None,
    clock: Callable[[], float],
) -> None:
    """Complete the body of a request. Raises ApiError; an inline task.

    While images arrive they count as bytes of a body that is being answered. An error is about the
    request: no replica was asked, and none is lacking.
    """
    request, began_s, is_over, held_bytes = context.request, clock(), False, 0
    assert request.fetch_images is not None

    def hold(count: int) -> None:
        nonlocal held_bytes
        # Downloads of a request that was cancelled end a moment later.
        if not is_over:
            bodies.take(request.tenant_id, count)
            held_bytes += count

    try:
        request.body = context.stream.body = await request.fetch_images(request.body, hold)
    except ApiError:
        context.is_declined, context.outcome = True, OUTCOME_REFUSED
        raise
    finally:
        is_over = True
        bodies.release(request.tenant_id, held_bytes)
        if tracer is not None:
            tracer.add_fetch(context, began_s)
