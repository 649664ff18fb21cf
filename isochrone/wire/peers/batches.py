"""Batch work between routers and the scheduler, over HTTP beside the control connection.

A router leases items for which it has idle capacity, answers them like any other request, and
returns the results. It renews its leases while it works. A result is accepted once, whichever
router sends it, so every message may be repeated.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from isochrone.wire.ids import KeyId, TenantId

LEASE_PATH: Final = "/v1/batch-service/lease"
RESULTS_PATH: Final = "/v1/batch-service/results"

LEASED_MAX: Final = 256
"""The most items that one message may request, renew or return."""

ITEM_BYTES_MAX: Final = 8 * 1024 * 1024
"""The longest line of an input file, and the limit of a request's body."""

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""The longest answer that is stored for an item."""


class ItemRef(msgspec.Struct, frozen=True, array_like=True):
    """One leased item."""

    batch_id: str
    line: int
    lease_id: str


class LeaseItems(msgspec.Struct, frozen=True, kw_only=True):
    """A router asks for items: at most `wanted[deployment]` of each deployment.

    It still works on those that it `holds`, whose leases are renewed.
    """

    wanted: dict[str, Annotated[int, Meta(ge=1, le=LEASED_MAX)]]
    holds: Annotated[tuple[ItemRef, ...], Meta(max_length=4 * LEASED_MAX)] = ()


class LeasedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item to answer on behalf of a key. `body` is that of a request to `endpoint`.

    With `is_key_valid` a router that does not know the key yet will soon.
    """

    ref: ItemRef
    tenant_id: TenantId
    key_id: KeyId
    endpoint: str
    body: bytes
    is_key_valid: bool = False


class LeasedItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items that a router got, and those that it holds and no longer needs to answer."""

    items: tuple[LeasedItem, ...] = ()
    lost: tuple[ItemRef, ...] = ()


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an item.

    With `retry_after_s` there is no answer: the item is to be tried again then, and
    `counts_as_attempt` if it may be at fault.
    """

    ref: ItemRef
    status_code: int = 0
    request_id: str = ""
    body: bytes = b""
    retry_after_s: float = 0.0
    counts_as_attempt: bool = False


class ItemResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of items, in any order."""

    results: Annotated[tuple[ItemResult, ...], Meta(max_length=LEASED_MAX)]
