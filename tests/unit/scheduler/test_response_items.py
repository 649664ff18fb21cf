"""Items of stored responses are listed in pages, and storage has limits."""

import json

import msgspec
import pytest

from scheduler.decide.response_items import (
    ended_body,
    join_items,
    output_items,
    page_of,
    storage_refusal,
    stored_items,
)
from scheduler.decide.response_limits import ResponseLimits

LIMITS = ResponseLimits(tenant_count_max=3, tenant_bytes_max=2**20)
ITEMS = json.dumps([{"id": name} for name in "abcd"]).encode()


@pytest.mark.parametrize(
    ("after", "is_ascending", "limit", "expected", "has_more"),
    [
        ("", True, 3, "abc", True),
        ("", True, 4, "abcd", False),
        ("", False, 2, "dc", True),
        ("c", True, 9, "d", False),
        ("c", False, 1, "b", True),
        ("d", True, 9, "", False),
    ],
)
def test_items_are_listed_in_pages(
    after: str, is_ascending: bool, limit: int, expected: str, has_more: bool
) -> None:
    page = page_of(ITEMS, after=after, is_ascending=is_ascending, limit=limit)
    assert page is not None
    ids = [json.loads(bytes(item))["id"] for item in page.items]
    assert ("".join(ids), page.has_more) == (expected, has_more)


def test_nothing_comes_after_an_unknown_item() -> None:
    assert page_of(ITEMS, after="unknown", is_ascending=True, limit=9) is None


def test_items_keep_every_field() -> None:
    body = json.dumps({"id": "r", "output": [{"id": "o", "x": {"y": 1}}], "status": "queued"})
    joined = join_items(ITEMS, output_items(body.encode()), b"[]")
    assert json.loads(joined)[-1] == {"id": "o", "x": {"y": 1}}
    assert [item.item_id for item in stored_items(joined)] == [*"abcd", "o"]
    failed = json.loads(ended_body(body.encode(), "failed", "why"))
    assert (failed["status"], failed["error"]["message"], failed["id"]) == ("failed", "why", "r")
    with pytest.raises(msgspec.DecodeError):
        stored_items(b"[{}]")


@pytest.mark.parametrize(
    ("count", "size_bytes", "new_bytes", "match"),
    [
        (2, 2**20 - 10, 10, None),
        (3, 0, 10, "3 responses or conversations"),
        (2, 2**20 - 10, 11, "1 MiB of responses"),
    ],
)
def test_a_tenant_stores_up_to_its_limits(
    count: int, size_bytes: int, new_bytes: int, match: str | None
) -> None:
    refusal = storage_refusal(count, size_bytes, new_bytes, LIMITS)
    assert refusal is None if match is None else match in (refusal or "")
    assert "does not store" in (storage_refusal(0, 0, 0, ResponseLimits(tenant_bytes_max=0)) or "")
