"""The bytes of images count against their tenant while they arrive, and no longer."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from router.apis.linked_images.fetcher import LookupThreads
from router.decide.admission.body_limits import AnsweredBodies
from router.decide.admission.limits import LimitExceeded
from router.fetch_images import fetch_images
from router.request_context import OUTCOME_FAILED, OUTCOME_REFUSED

ACME = TenantId("acme")


class Fetch:
    """Holds bytes, and ends as told."""

    def __init__(self, counts: list[int], error: BaseException | None = None) -> None:
        self.counts = counts
        self.error = error
        self.hold: Callable[[int], None] = lambda _: None

    async def __call__(self, body: bytes, hold: Callable[[int], None]) -> bytes:
        self.hold = hold
        for count in self.counts:
            hold(count)
        if self.error is not None:
            raise self.error
        return body + b" with images"


def a_context(fetch: Fetch) -> Any:
    request = SimpleNamespace(tenant_id=ACME, body=b"body", fetch_images=fetch)
    stream = SimpleNamespace(body=b"body")
    return SimpleNamespace(
        request=request, stream=stream, is_declined=False, outcome=OUTCOME_FAILED
    )


def run(context: Any, bodies: AnsweredBodies) -> None:
    asyncio.run(fetch_images(context, bodies, None, lambda: 0.0))


def free(bodies: AnsweredBodies) -> int:
    """Return how many bytes a tenant could take at once; all if none are held."""
    return next(size for size in range(2000, -1, -1) if _fits(bodies, size))


def _fits(bodies: AnsweredBodies, size: int) -> bool:
    try:
        bodies.take(ACME, size)
    except LimitExceeded:
        return False
    bodies.release(ACME, size)
    return True


def test_every_attempt_gets_the_body_with_the_images() -> None:
    bodies, context = AnsweredBodies(1000), a_context(Fetch([100, 200]))
    run(context, bodies)
    assert context.request.body == context.stream.body == b"body with images"
    assert free(bodies) == 1000
    assert not context.is_declined


@pytest.mark.parametrize(
    "error", [ApiError(ErrorCode.INVALID_IMAGE_URL, "x"), asyncio.CancelledError()]
)
def test_nothing_is_held_after_the_end(error: BaseException) -> None:
    fetch, bodies = Fetch([100, 200], error), AnsweredBodies(1000)
    context = a_context(fetch)
    with pytest.raises(type(error)):
        run(context, bodies)
    # A download that is cancelled may get a last chunk.
    fetch.hold(300)
    assert free(bodies) == 1000
    assert context.is_declined == (context.outcome is OUTCOME_REFUSED)
    assert context.is_declined == isinstance(error, ApiError)


def test_a_tenant_has_images_up_to_its_share() -> None:
    bodies, context = AnsweredBodies(1000), a_context(Fetch([400, 400]))
    with pytest.raises(LimitExceeded):
        run(context, bodies)
    assert free(bodies) == 1000


def test_names_are_looked_up_in_threads_and_may_be_unknown() -> None:
    async def look_up() -> None:
        lookups = LookupThreads()
        assert "127.0.0.1" in await lookups.look_up("localhost")
        for unknown in ("a" * 64 + ".invalid", "a..invalid"):
            with pytest.raises(OSError, match=r"not a host name|not known|No address"):
                await lookups.look_up(unknown)
        assert not lookups.running

    asyncio.run(look_up())
