"""References to items of stored responses are replaced by the items."""

import json
from typing import Any

import pytest

from isochrone.wire.errors import ApiError
from router.apis.responses.references import (
    ITEMS_BYTES_MAX,
    RESPONSES_MAX,
    may_have_references,
    referenced_responses,
    with_items,
)

FIRST, SECOND = f"resp_{'a' * 32}", f"resp_{'b' * 32}"
HELLO = {"role": "user", "content": "hi"}


def refer(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def body_of(*items: Any) -> bytes:
    return json.dumps({"model": "m", "input": items, "store": True}).encode()


def test_items_take_the_place_of_references() -> None:
    text = {"type": "message", "id": f"msg_{FIRST}_1", "role": "assistant", "content": "a"}
    call = {"type": "function_call", "id": f"fc_{SECOND}_0"}
    thought = {"type": "reasoning", "id": f"rs_{FIRST}_0"}
    named = (thought, text, "no item", call)
    given = [refer(item["id"]) if isinstance(item, dict) else item for item in named]
    body = body_of(HELLO, *given, HELLO)
    assert may_have_references(body)
    assert referenced_responses(body) == [FIRST, SECOND]
    items = {item["id"]: item for item in (thought, text, call)}
    whole = json.loads(with_items(body, items))
    assert whole == {"model": "m", "input": [HELLO, *named, HELLO], "store": True}


@pytest.mark.parametrize(("of", "read"), [("resp_req-1", []), (FIRST, [FIRST])])
def test_reasoning_is_left_out_if_it_is_not_stored(of: str, read: list[str]) -> None:
    body = body_of(HELLO, refer(f"rs_{of}_0"))
    assert referenced_responses(body) == read
    assert json.loads(with_items(body, {}))["input"] == [HELLO]


@pytest.mark.parametrize("item_id", ["msg_resp_req-1_0", f"msg_{FIRST}_in_0", "x", f"{FIRST}_0"])
def test_an_item_of_no_stored_response_is_refused(item_id: str) -> None:
    with pytest.raises(ApiError, match=r"field 'input\[1\]': .* send the item itself") as refused:
        referenced_responses(body_of(HELLO, refer(item_id)))
    assert refused.value.param == "input[1]"


def test_an_item_that_is_not_found_is_refused() -> None:
    body = body_of(refer(f"msg_{FIRST}_7"))
    with pytest.raises(ApiError, match=r"field 'input\[0\]': no stored response has the item"):
        with_items(body, {f"msg_{FIRST}_0": HELLO})


def test_the_number_of_responses_is_limited() -> None:
    body = body_of(*(refer(f"msg_resp_{n:032x}_0") for n in range(RESPONSES_MAX + 1)))
    with pytest.raises(ApiError, match=f"65 responses, more than {RESPONSES_MAX}"):
        referenced_responses(body)


def test_the_number_of_items_is_limited() -> None:
    """Each was decoded twice: 200,000 in a body of 8 MB took 0.2 s."""
    with pytest.raises(ApiError, match="it has 10001 items, more than 10000"):
        referenced_responses(body_of(*[refer("rs_1")] * 10_001))


def test_the_size_of_the_items_is_limited() -> None:
    """One item may be referred to many times."""
    item_id = f"msg_{FIRST}_0"
    item = {"id": item_id, "content": "x" * (ITEMS_BYTES_MAX // 2)}
    assert len(with_items(body_of(refer(item_id)), {item_id: item})) > ITEMS_BYTES_MAX // 2
    with pytest.raises(ApiError, match=f"more than {ITEMS_BYTES_MAX} bytes"):
        with_items(body_of(refer(item_id), refer(item_id)), {item_id: item})


@pytest.mark.parametrize(
    "body",
    [
        *(b"no JSON", b"[]", b"{}", b'{"input": "hi"}', b'{"input": [], "a": "item_reference"}'),
        b'{"input": ' + 5000 * b"[" + 5000 * b"]" + b"}",
    ],
    ids=["text", "list", "empty", "no items", "no references", "nested deeply"],
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert referenced_responses(body) == []
    assert with_items(body, {}) == body
