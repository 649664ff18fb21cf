"""Lines of batches are read one by one, and tenants take turns."""

import io
import json
from codecs import BOM_UTF8
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from isochrone.wire.errors import ApiError
from isochrone.wire.peers.batches import ITEM_BYTES_MAX
from scheduler.api.client_objects.batch_files import parse_limit
from scheduler.api.client_objects.queued_runs import result_parts
from scheduler.decide.batch_lines import (
    ParsedLine,
    error_line,
    parse_line,
    request_body,
    result_line,
    run_response,
)
from scheduler.decide.batch_shares import WaitingBatch, share_items
from scheduler.decide.batch_steps import DueStep, next_steps
from scheduler.state.files import batch_input
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder
from scheduler.state.files.batch_input import BatchInput, has_more_lines

CHAT = "/v1/chat/completions"
KNOWN = {"m", "other"}


def a_line(**fields: Any) -> bytes:
    body = {"model": "m", "messages": []}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body, **fields}
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not JSON", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b'{"custom_id": 3}', "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (a_line(custom_id="a\0"), "invalid_custom_id"),
        (a_line(custom_id="a" * 513), "invalid_custom_id"),
        (a_line(method="GET"), "invalid_method"),
        (a_line(url="/v1/embeddings"), "invalid_url"),
        (a_line(body={}), "model_not_found"),
        (a_line(body={"model": 3}), "model_not_found"),
        (a_line(body={"model": "other"}), "mismatched_model"),
        (a_line(body={"model": "other:mine"}), "mismatched_model"),
        (a_line(body={"model": "none"}), "model_not_found"),
        (a_line(body={"model": "none:mine"}), "model_not_found"),
        (a_line(body={"model": "m", "stream": True}), "invalid_request"),
    ],
)
def test_a_line_that_cannot_be_used_has_its_own_error(line: bytes, code: str) -> None:
    parsed = parse_line(line, CHAT, "m", KNOWN)
    assert parsed.error_code == code
    assert parsed.message.startswith("cannot")


def test_a_line_names_its_model_and_has_a_body() -> None:
    assert parse_line(a_line(), CHAT, "", KNOWN) == ParsedLine("a", "m")
    assert json.loads(request_body(a_line())) == {"model": "m", "messages": []}
    unstreamed = a_line(body={"model": "m", "stream": False})
    assert parse_line(unstreamed, CHAT, "m", KNOWN).error_code == ""


@pytest.mark.parametrize(
    ("model", "deployment"),
    [("m", "m"), ("m:mine", "m"), ("m:v2", "m:v2"), ("m:v2:mine", "m:v2"), (":m", ""), ("x:m", "")],
)
def test_a_line_may_name_an_adapter_of_its_deployment(model: str, deployment: str) -> None:
    line = a_line(body={"model": model})
    assert parse_line(line, CHAT, "", KNOWN | {"m:v2"}).deployment == deployment


@pytest.mark.parametrize(
    ("code", "number"), [("model_not_found", 3042), ("invalid_request", 5006), ("x", 404)]
)
def test_an_error_of_a_queued_run_has_workers_ai_s_number(code: str, number: int) -> None:
    error = json.dumps({"error": {"message": "why", "code": code}}).encode()
    line = result_line(item_id="i", custom_id="3 mine", status_code=404, request_id="r", body=error)
    assert run_response(line) == {
        "id": 3,
        "external_reference": "mine",
        "result": None,
        "success": False,
        "errors": [{"code": number, "message": "AiError: why"}],
    }
    unanswered = error_line(item_id="i", custom_id="3 mine", code=code, message="why")
    assert run_response(unanswered)["errors"][0]["code"] == (number if code != "x" else 5000)


def test_results_of_queued_runs_are_joined_a_part_at_a_time(tmp_path: Path) -> None:
    """Embeddings of one client were 3.5 times their size in memory, at every poll."""
    count, numbers = 40, [0.1] * 4_000
    body = {"result": {"data": numbers, "usage": {"prompt_tokens": 2}}, "success": True}
    answer = json.dumps({**body, "errors": []}).encode()
    (tmp_path / "out").write_bytes(
        b"".join(
            result_line(
                item_id="i", custom_id=f"{n} x", status_code=200, request_id="", body=answer
            )
            for n in range(0, count, 2)
        )
    )
    (tmp_path / "err").write_bytes(
        b"".join(
            error_line(item_id="i", custom_id=f"{n} x", code="x", message="why")
            for n in range(1, count, 2)
        )
    )
    batch = SimpleNamespace(output_file_id="out", error_file_id="err")
    parts = list(result_parts(BatchFolder(tmp_path), batch))  # type: ignore[arg-type]
    assert len(parts) > 1
    assert max(map(len, parts)) < CHUNK_BYTES + 2 * len(answer)
    joined = json.loads(b"".join(parts))
    assert [response["id"] for response in joined["responses"]] == list(range(count))
    assert [response["success"] for response in joined["responses"]] == [True, False] * (count // 2)
    assert joined["usage"]["prompt_tokens"] == count


def test_lines_of_output_and_error_files() -> None:
    answered = json.loads(
        result_line(item_id="i", custom_id="a", status_code=200, request_id="r", body=b'{"x":1}')
    )
    assert answered == {
        "id": "i",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"x": 1}},
        "error": None,
    }
    failed = json.loads(error_line(item_id="i", custom_id="", code="c", message="m"))
    assert failed["error"] == {"code": "c", "message": "m"}
    assert failed["custom_id"] is None


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b'{\n "x": 1.50\n}\n', {"x": 1.5}),
        (b"<html>\r\nbad \xff gateway</html>\n", "<html>\r\nbad \ufffd gateway</html>\n"),
        (b"", ""),
        (b'{"x": NaN}', '{"x": NaN}'),
        (b"[" * 5000 + b"]" * 5000, "[" * 5000 + "]" * 5000),
        (b'{"x": "\xff"}', '{"x": "\ufffd"}'),
    ],
    ids=["pretty", "html", "empty", "not a number", "deep", "not UTF-8"],
)
def test_an_answer_of_any_form_is_one_line_of_json(answer: bytes, body: object) -> None:
    """The lines after it could not be read, and no results of its queued runs."""
    line = result_line(item_id="i", custom_id="0 x", status_code=200, request_id="r", body=answer)
    assert line.count(b"\n") == 1
    assert json.loads(line)["response"]["body"] == body
    assert run_response(line)["success"] is False


def test_an_answer_that_cannot_be_decoded_spoils_no_other_result() -> None:
    line = result_line(
        item_id="i", custom_id="7 x", status_code=200, request_id="r", body=b'{"x":1e999}'
    )
    response = run_response(line)
    assert (response["id"], response["success"]) == (7, False)
    assert "cannot read the answer" in response["errors"][0]["message"]


async def test_an_input_is_read_in_parts_with_the_place_of_each_line() -> None:
    texts = [a_line(custom_id=str(number)) for number in range(12_000)]
    texts[7] = b"x" * (ITEM_BYTES_MAX + 20_000_000)
    whole = b"\r\n\n".join(texts)
    lines = BatchInput(io.BytesIO(whole), CHAT, KNOWN)
    items = []
    while part := lines.next_items():
        items += part
    assert [item.line for item in items] == list(range(1, 12_001))
    assert items[7].error_code == "request_too_large"
    assert items[7].message.startswith("cannot read line 15 of the file")
    assert (lines.deployment, lines.lines) == ("m", 12_000)
    for number in (0, 6, 8, 11_999):
        item = items[number]
        place = slice(item.byte_offset, item.byte_offset + item.byte_length)
        assert whole[place].strip() == texts[number]
        assert item.custom_id == str(number)


async def test_a_line_that_cannot_be_read_is_named_by_its_number() -> None:
    text = b"\n".join([a_line(), b"", b"this is not JSON", a_line(custom_id="b", method="GET")])
    items = BatchInput(io.BytesIO(text), CHAT, KNOWN).next_items()
    assert [item.line for item in items] == [1, 2, 3]
    assert items[1].error_code == "invalid_json_line"
    assert items[1].message.endswith("(line 3 of the file)")
    assert items[2].message and "line" not in items[2].message


async def test_an_input_may_begin_with_a_byte_order_mark() -> None:
    text = BOM_UTF8 + a_line(custom_id="a") + b"\n" + a_line(custom_id="b")
    items = BatchInput(io.BytesIO(text), CHAT, KNOWN).next_items()
    assert [(item.custom_id, item.error_code) for item in items] == [("a", ""), ("b", "")]
    first = items[0]
    place = slice(first.byte_offset, first.byte_offset + first.byte_length)
    assert text[place] == a_line(custom_id="a") + b"\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"", 0),
        (b"\n \r\n\t\n", 0),
        (b"{}", 1),
        (b"{}\n\n{}\n  \nx", 3),
        (b"x" * 40_000_000 + b"\ny", 2),
    ],
    ids=["empty", "blank", "one", "three", "long"],
)
def test_lines_that_are_not_blank_are_counted(text: bytes, count: int) -> None:
    assert not has_more_lines(io.BytesIO(text), count)
    assert not count or has_more_lines(io.BytesIO(text), count - 1)


def test_a_file_of_blank_lines_is_refused_before_it_takes_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 MB of them failed after a minute of CPU, for the length of a transaction, each minute."""
    monkeypatch.setattr(batch_input, "BLANK_LINES_MAX", 3)
    assert not has_more_lines(io.BytesIO(b"\n\n{}\n \n{}"), 9)
    source = io.BytesIO(b"\n" * 99)
    assert has_more_lines(source, 9)
    assert source.tell() == 4


def test_tenants_take_turns_and_the_oldest_batch_of_each_comes_first() -> None:
    batches = [
        WaitingBatch("a1", "a", "key", "m", 100),
        WaitingBatch("a2", "a", "key", "m", 100),
        WaitingBatch("b1", "b", "key", "m", 2),
        WaitingBatch("b2", "b", "key", "m", 9),
        WaitingBatch("c1", "c", "key", "other", 9),
    ]
    assert share_items(batches, {}, {"m": 10}) == {"a1": 5, "b1": 2, "b2": 3}
    assert share_items(batches, {"a": 8}, {"m": 10}) == {"a1": 1, "b1": 2, "b2": 7}
    assert share_items(batches, {}, {"m": 500}) == {"a1": 100, "a2": 100, "b1": 2, "b2": 9}
    assert share_items(batches, {}, {"other": 1, "none": 5}) == {"c1": 1}
    assert share_items(batches, {}, {}) == {}


@pytest.mark.parametrize(
    ("due", "running", "started"),
    [
        ("", "", ""),
        ("aaaa", "", "aa"),
        ("aaab", "", "aab"),
        ("aabc", "aa", "bc"),
        ("aabcd", "aa", "bc"),
        ("abab", "b", "aba"),
        ("abc", "aabb", ""),
        ("a", "bbc", "a"),
    ],
)
def test_steps_of_tenants_run_beside_each_other(due: str, running: str, started: str) -> None:
    steps = [DueStep(str(number), tenant) for number, tenant in enumerate(due)]
    chosen = next_steps(steps, running)
    assert sorted(step.tenant_id for step in chosen) == sorted(started)
    for tenant in set(due):
        own = [step for step in steps if step.tenant_id == tenant]
        of_tenant = [step for step in chosen if step.tenant_id == tenant]
        assert of_tenant == own[: len(of_tenant)], "the oldest first"


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", 20), ("limit=1", 1), ("limit=100", 100), ("limit=0", 0), ("limit=101", 0)]
    + [(f"limit={text}", 0) for text in ("-1", "1e2", "%C2%B2", "0000000001", "")],
)
def test_a_page_has_a_limit_of_objects(text: str, limit: int) -> None:
    """A page of all that a tenant ever stored would be read and encoded at once."""
    request = make_mocked_request("GET", f"/v1/batches?{text}")
    if limit:
        assert parse_limit(request, 20, 100) == limit
        return
    with pytest.raises(ApiError, match="expected 1 to 100"):
        parse_limit(request, 20, 100)
