"""Schemas that would end an engine's compiler of grammars reach no engine."""

import json
from typing import Any

import pytest

from isochrone.wire.engines.schema_numbers import NUMBER_MIN
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.drivers.request_body import with_fields

LOW = [-(2**63), NUMBER_MIN - 1, -9.3e18, -(10**30)]


def in_a_format(number: float) -> dict[str, Any]:
    schema = {"properties": {"a": {"items": [{"enum": [1, number]}]}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def in_a_tool(number: float) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", "parameters": {"minimum": number}}}]}


def in_text(number: float) -> dict[str, Any]:
    return {"structured_outputs": {"json": json.dumps({"const": number})}}


@pytest.mark.parametrize("place", [in_a_format, in_a_tool, in_text])
@pytest.mark.parametrize("number", LOW)
def test_a_schema_with_a_very_low_number_is_refused(place: Any, number: float) -> None:
    body = place(number)
    with pytest.raises(ApiError, match="has a number below") as refused:
        with_fields(json.dumps(body).encode(), {})
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.param in body


@pytest.mark.parametrize("place", [in_a_format, in_a_tool])
@pytest.mark.parametrize("number", [NUMBER_MIN, 2**63, 1e300, -1.5])
def test_other_numbers_pass(place: Any, number: float) -> None:
    body = place(number)
    assert json.loads(with_fields(json.dumps(body).encode(), {"model": "m"})) == {
        **body,
        "model": "m",
    }


def test_a_number_in_a_message_passes() -> None:
    body = {"messages": [{"content": str(-(2**63))}], "seed": -(2**63)}
    assert json.loads(with_fields(json.dumps(body).encode(), {})) == body
