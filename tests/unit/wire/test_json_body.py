"""Which bodies are accepted: UTF-8, whole surrogate pairs, bounded nesting."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http import json_body
from isochrone.wire.http.json_body import (
    JSON_CONTAINERS_MAX,
    JSON_DEPTH_MAX,
    JSON_STRINGS_MAX,
    UnsafeJson,
    check_json_body,
)

PIECES = ("\\ud83d", "\\ude00", "\\uD800", "\\\\", "\\n", '\\"', "ud800", "[", "}", "x", "\\u0041")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\ud800"}',
        b'{"a": "' + b"[" * 1000 + b'"}',
        b'["\\"' + b"[" * 1000 + b'\\\\", []]',
        nested(JSON_DEPTH_MAX),
        b"[" + b",".join([nested(JSON_DEPTH_MAX - 1)] * 100) + b"]",
        "é".encode(),
        b"[" + b'"", ' * (JSON_STRINGS_MAX - 1) + b'""]',
        b'["' + b'\\"a\\":1,' * 2 * JSON_STRINGS_MAX + b'"]',
    ],
)
def test_a_body_that_all_parsers_read_is_accepted(body: bytes) -> None:
    check_json_body(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b'{"a": "\\ude00\\ud83d"}', "lone surrogate"),
        (b'{"a": "\\ud83d\\\\\\ude00"}', "lone surrogate"),
        (nested(JSON_DEPTH_MAX + 1), "nested 97 levels deep, the limit is 96"),
        (b'["' + b"\\\\" * 3 + b'", ' + nested(JSON_DEPTH_MAX) + b"]", "nested 97"),
        (b"[" + b"[]," * JSON_CONTAINERS_MAX + b"[]]", "more than 100000 arrays and objects"),
        (b"{" + b'"a\\\\":"",' * JSON_STRINGS_MAX + b"}", "more than 200000 strings"),
    ],
)
def test_a_body_that_parsers_may_read_differently_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(UnsafeJson, match=reason):
        check_json_body(body)


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_exactly_the_texts_with_a_lone_surrogate_are_refused(inner: str) -> None:
    try:
        text = json.loads(f'"{inner}"')
    except ValueError:
        return
    has_lone_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    try:
        check_json_body(f'"{inner}"'.encode())
    except UnsafeJson:
        assert has_lone_surrogate
    else:
        assert not has_lone_surrogate


@given(st.lists(st.sampled_from(["[" * 40, "{" * 30, "]" * 20, "}", '"', "\\"]), max_size=12))
def test_a_body_of_few_brackets_needs_no_check_of_its_nesting(parts: list[str]) -> None:
    body = "".join(parts).encode()

    def refusal(check: Callable[[bytes], None]) -> str:
        try:
            check(body)
        except UnsafeJson as unsafe:
            return str(unsafe)
        return ""

    assert refusal(check_json_body) == refusal(json_body._check_nesting)


def depth_of(body: bytes) -> int:
    """Return how deep brackets outside strings are nested, read byte by byte."""
    depth = most = 0
    is_string = is_escaped = False
    for byte in body:
        was_escaped, is_escaped = is_escaped, byte == ord("\\")
        if was_escaped and byte in b'\\"':
            is_escaped = False
        elif byte == ord('"'):
            is_string = not is_string
        elif not is_string:
            depth += (byte in b"[{") - (byte in b"]}")
            most = max(most, depth)
    return most


@given(st.lists(st.sampled_from(["[", "{", "]", "}", '"', '""', "\\", "x"]), max_size=30))
def test_the_depth_is_that_of_the_brackets_outside_strings(parts: list[str]) -> None:
    body = b"[" * (JSON_DEPTH_MAX - 3) + "".join(parts).encode()
    refusal = ""
    try:
        json_body._check_nesting(body)
    except UnsafeJson as unsafe:
        refusal = str(unsafe)
    depth = depth_of(body)
    expected = f"nested {depth} levels deep, the limit is {JSON_DEPTH_MAX}"
    assert refusal == (expected if depth > JSON_DEPTH_MAX else "")
