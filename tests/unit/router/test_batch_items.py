"""What becomes of an item of a batch that is not answered."""

from typing import Any, NoReturn

import pytest

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import BootId, KeyId, TenantId
from isochrone.wire.peers.batches import ItemRef, ItemResult, LeasedItem
from router.apis.batches.answer import ItemAnswerer, later_attempt
from router.apis.request_ids import RequestIds
from router.decide.attempt import NoNodeReached


def not_read(*given: Any) -> NoReturn:
    raise AssertionError(f"read although its key is not known: {given}")


async def answer(*, is_key_valid: bool) -> ItemResult:
    """Return the result of an item whose key the router does not know."""
    answerer = ItemAnswerer(
        keys=lambda: KeyTable.of([]),
        read=not_read,
        serve=not_read,
        request_ids=RequestIds(BootId("boot")),
        clock=lambda: 0.0,
        unix_clock=lambda: 0.0,
    )
    item = LeasedItem(
        ref=ItemRef("batch", 0, "lease"),
        tenant_id=TenantId("acme"),
        key_id=KeyId("k"),
        endpoint="/v1/chat/completions",
        body=b"{}",
        is_key_valid=is_key_valid,
    )
    result = await answerer.answer(item, 0)
    assert isinstance(result, ItemResult)
    return result


async def test_an_item_waits_until_its_router_knows_its_key() -> None:
    """A key reaches routers one after the other, and another one has accepted the batch."""
    waits = await answer(is_key_valid=True)
    assert (waits.retry_after_s, waits.counts_as_attempt) == (5.0, False)
    ends = await answer(is_key_valid=False)
    assert (ends.status_code, ends.retry_after_s) == (401, 0.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ApiError(ErrorCode.OUT_OF_CAPACITY, "full", retry_after_s=2.0), (2.0, False)),
        (ApiError(ErrorCode.RATE_LIMITED, "limit", retry_after_s=900.0), (60.0, False)),
        (ApiError(ErrorCode.UNAVAILABLE, "no replica"), (5.0, False)),
        (NoNodeReached(ErrorCode.UPSTREAM, "none reached", retry_after_s=1.0), (1.0, False)),
        (ApiError(ErrorCode.UPSTREAM, "broken", retry_after_s=0.1), (1.0, True)),
        (ApiError(ErrorCode.INTERNAL, "a bug"), (5.0, True)),
        (ApiError(ErrorCode.INVALID_REQUEST, "no"), None),
        (ApiError(ErrorCode.REQUEST_SUSPENDED, "two engines failed"), None),
    ],
    ids=str,
)
def test_an_attempt_counts_if_the_item_may_be_the_cause(
    error: ApiError, expected: tuple[float, bool] | None
) -> None:
    assert later_attempt(error, 60.0) == expected
