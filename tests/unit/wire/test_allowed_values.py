"""An error about a wrong value lists the values that the field may have."""

import re
from enum import StrEnum
from typing import Literal, TypeVar

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.http import invalid_field
from isochrone.wire.http.allowed_values import LISTED_MAX, allowed_values
from isochrone.wire.http.invalid_field import decode_public

T = TypeVar("T")


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Circle(msgspec.Struct, tag="circle", tag_field="kind"):
    fill: Colour = Colour.RED


class Square(msgspec.Struct, tag="square", tag_field="kind"):
    fill: Literal["none"] = "none"
    inner: "Circle | Square | None" = None


class Drawing(msgspec.Struct):
    effort: Literal["low", "high"] | None = None
    shapes: list[Circle | Square] | str = ""
    by_name: dict[str, Colour] = {}
    pair: tuple[int, Literal[1, 2]] = (0, 1)
    words: msgspec.Raw = msgspec.Raw(b"")
    renamed: Literal[True] = msgspec.field(default=True, name="as")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"effort":"extreme"}', "field 'effort': 'extreme' is not one of 'high', 'low'"),
        (
            b'{"shapes":[{"kind":"star"}]}',
            "field 'shapes[0].kind': 'star' is not one of 'circle', 'square'",
        ),
        (
            b'{"shapes":[{"kind":"circle","fill":"none"}]}',
            "field 'shapes[0].fill': 'none' is not one of 'red', 'blue'",
        ),
        (
            b'{"shapes":[{"kind":"square","inner":{"kind":"no"}}]}',
            "field 'shapes[0].inner.kind': 'no' is not one of 'circle', 'square'",
        ),
        (
            b'{"by_name":{"a":"green"}}',
            "field 'by_name[...]': 'green' is not one of 'red', 'blue'",
        ),
        (b'{"pair":[1,3]}', "field 'pair[1]': 3 is not one of 1, 2"),
        (b'{"as":false}', "field 'as': false is not one of true"),
    ],
)
def test_the_values_are_listed(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode_public(body, msgspec.json.Decoder(Drawing))
    assert refused.value.message == f"cannot use {message}"


def test_a_long_value_is_cut_and_the_list_stays() -> None:
    body = msgspec.json.encode({"effort": "x" * 1000})
    with pytest.raises(ApiError) as refused:
        decode_public(body, msgspec.json.Decoder(Drawing))
    assert refused.value.message.endswith("is not one of 'high', 'low'")


@pytest.mark.parametrize("path", ["no", "effort.more", "shapes", "words.x", "", "pair[7]", "as[0]"])
def test_a_place_without_such_values_has_none(path: str) -> None:
    assert allowed_values(Drawing, path) == ""


def test_only_some_of_many_values_are_named() -> None:
    many = Literal[tuple(f"v{n}" for n in range(LISTED_MAX + 5))]  # type: ignore[valid-type]
    named = allowed_values(list[many], "[3]")  # type: ignore[valid-type]
    assert named.count(",") == LISTED_MAX - 1
    assert named.endswith(" and 5 more")


@pytest.mark.parametrize("body", [None, {}, {"shapes": []}, {"shapes": [{"kind": "star"}]}])
def test_without_a_known_tag_the_values_of_each_type_are_named(body: object) -> None:
    named = allowed_values(Drawing, "shapes[0].fill", body)
    assert named == "'red', 'blue', 'none'"


def test_a_value_as_long_as_the_body_is_not_searched_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 8 MB, in a form that the search begins with again and again, took three seconds."""
    searched: list[int] = []

    class MeasuringPattern:
        def search(self, text: str) -> re.Match[str] | None:
            searched.append(len(text))
            return found.search(text)

        def sub(self, replacement: str, text: str) -> str:
            return found.sub(replacement, text)

    found = invalid_field._INVALID_FIELD
    monkeypatch.setattr(invalid_field, "_INVALID_FIELD", MeasuringPattern())
    body = msgspec.json.encode({"effort": 100_000 * " - at `$"})
    with pytest.raises(ApiError, match="is not one of") as refused:
        decode_public(body, msgspec.json.Decoder(Drawing))
    assert refused.value.param is not None
    assert max(searched) < 2 * invalid_field.REASON_CHARS_MAX
