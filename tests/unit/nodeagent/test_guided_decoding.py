"""TensorRT-LLM gets schemas in the fields that it follows, or the request is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineCommand, EngineLaunch
from nodeagent.drivers.guided_decoding import CALL_FORMATS, GuidedDecoding
from nodeagent.drivers.request_body import PLAIN, with_fields
from tests.builders import a_spec

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def a_tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def sent(parser: str = "qwen3", **fields: Any) -> dict[str, Any]:
    command = msgspec.structs.replace(PLAIN, guided=GuidedDecoding(parser))
    body = with_fields(msgspec.json.encode(fields), {}, command)
    decoded: dict[str, Any] = json.loads(body)
    return decoded


def a_command(folder: Path, **options: str) -> EngineCommand:
    engine = EngineSettings(driver="tensorrt_llm", options=options, kv_memory_bytes=1 << 20)
    launch = EngineLaunch(
        spec=a_spec(engine=engine, device_ids=(DeviceId("gpu0"),)),
        model_path=folder,
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
    )
    return DRIVERS["tensorrt_llm"].command(launch)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
            {"type": "json", "schema": SCHEMA},
        ),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, {"type": "json_object"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, {"type": "text"}),
        (None, None),
    ],
)
def test_a_schema_is_sent_without_its_envelope(given: Any, expected: Any) -> None:
    """The engine takes OpenAI's envelope for a schema, which allows any JSON."""
    assert sent(response_format=given)["response_format"] == expected


@pytest.mark.parametrize("envelope", [None, 3, {"schema": 3}, {"schema": [1]}])
def test_a_response_format_without_a_schema_is_refused(envelope: Any) -> None:
    with pytest.raises(ApiError, match=r"json_schema\.schema") as refused:
        sent(response_format={"type": "json_schema", "json_schema": envelope})
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("parser", CALL_FORMATS)
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_calls_of_strict_functions_follow_their_schemas(
    parser: str, choice: dict[str, str]
) -> None:
    tools = [a_tool("f", strict=True), a_tool("g", strict=False), a_tool("h")]
    fields = sent(parser, tools=tools, **choice)
    assert fields["tools"] == [a_tool(name) for name in "fgh"], "the engine forbids `strict`"
    response_format = fields["response_format"]
    assert response_format["type"] == "structural_tag"
    grammar = response_format["format"]
    assert grammar["type"] == "triggered_tags", "the model may answer with a text, too"
    (trigger,) = grammar["triggers"]
    for name, tag in zip("fgh", grammar["tags"], strict=True):
        assert tag["begin"].startswith(trigger)
        assert name in tag["begin"].removeprefix(trigger)
        content = tag["content"].get("elements", [tag["content"]])[-1]["json_schema"]
        assert (content == SCHEMA) is (name == "f")
        assert content["type"] == "object"


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("parser", CALL_FORMATS)
@pytest.mark.parametrize(
    ("choice", "names", "is_single"), [("required", "fg", False), (NAMED, "g", True)]
)
def test_a_call_that_is_required_is_made_and_follows_its_schema(
    parser: str, choice: Any, names: str, is_single: bool
) -> None:
    tools = [a_tool("f", strict=False), a_tool("g")]
    # A text is not written, so its format does not matter.
    fields = sent(parser, tools=tools, tool_choice=choice, response_format={"type": "json_object"})
    assert fields["tool_choice"] == "auto", "the engine knows no other one that it enforces"
    grammar = fields["response_format"]["format"]
    opening = CALL_FORMATS[parser].opening
    if opening:
        assert grammar["elements"][0] == {"type": "const_string", "value": opening}
        grammar = grammar["elements"][1]
    assert (grammar["at_least_one"], grammar["stop_after_first"]) == (True, is_single)
    assert len(grammar["tags"]) == len(names)
    for name, tag in zip(names, grammar["tags"], strict=True):
        content = tag["content"].get("elements", [tag["content"]])[-1]["json_schema"]
        assert (content == SCHEMA) is (name == "g")


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "no"}}, {"type": 3}])
def test_a_tool_that_is_not_there_cannot_be_required(choice: Any) -> None:
    with pytest.raises(ApiError, match="no function of 'tools'") as refused:
        sent(tools=[a_tool()], tool_choice=choice)
    assert refused.value.param == "tool_choice"


def test_no_call_is_required_of_a_model_that_reasons_first() -> None:
    body = msgspec.json.encode({"tools": [a_tool()], "tool_choice": "required"})
    command = msgspec.structs.replace(PLAIN, guided=GuidedDecoding("qwen3", reasons=True))
    with pytest.raises(ApiError, match="begin with reasoning") as refused:
        with_fields(body, {}, command)
    assert refused.value.param == "tool_choice"


def test_one_call_is_all_that_an_answer_has_if_the_client_says_so() -> None:
    fields = sent(tools=[a_tool(), a_tool("g", strict=True)], parallel_tool_calls=False)
    assert "parallel_tool_calls" not in fields, "the engine forbids it"
    assert fields["response_format"]["format"]["stop_after_first"] is True
    fields = sent(tools=[a_tool()], parallel_tool_calls=False)
    assert fields["response_format"]["format"]["stop_after_first"] is True
    for unused in ({"parallel_tool_calls": True}, {"parallel_tool_calls": None}):
        assert sent(tools=[a_tool()], **unused) == {"tools": [a_tool()]}
    assert sent(parallel_tool_calls=False) == {}
    with pytest.raises(ApiError, match="'parallel_tool_calls': false") as refused:
        sent("unknown", tools=[a_tool()], parallel_tool_calls=False)
    assert refused.value.param == "parallel_tool_calls"


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": None}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
    ],
)
def test_the_engine_gets_one_name_of_the_limit(given: dict[str, Any], limit: int) -> None:
    """It knows both, and refuses a request that has both."""
    assert sent(**given) == {"max_tokens": limit}


def test_the_engine_gets_no_field_without_effect_that_it_refuses() -> None:
    assert sent(metadata={"a": "b"}, prompt_cache_key="k", store=False, user="u") == {"user": "u"}


def test_a_function_without_a_strict_one_is_left_to_the_engine() -> None:
    fields = sent("unknown", tools=[a_tool(strict=False)], response_format={"type": "text"})
    assert fields == {"tools": [a_tool()], "response_format": {"type": "text"}}
    fields = sent("unknown", tools=[a_tool(strict=True)], tool_choice="none")
    assert fields == {"tools": [a_tool()], "tool_choice": "none"}
    for tools in (None, 3, [1, {}, {"function": 7}]):
        assert sent(tools=tools) == {"tools": tools}


@pytest.mark.parametrize(
    ("parser", "fields", "param"),
    [
        ("", {}, "tools"),
        ("qwen3_coder", {}, "tools"),
        ("qwen3_coder", {"tool_choice": "required"}, "tool_choice"),
        ("qwen3", {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_strict_functions_that_cannot_be_held_are_refused(
    parser: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError, match=r"'strict'|required tool") as refused:
        sent(parser, tools=[a_tool(strict=True)], **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "options", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", {}, "qwen3"),
        ("{% if tools %}<tool_call>{% endif %}", {"tool_parser": "none"}, ""),
        ("{{ messages }}", {}, ""),
        ("{{ messages }}", {"tool_parser": "DeepSeekV3"}, "deepseekv3"),
    ],
)
def test_the_engine_gets_a_parser_and_follows_schemas(
    tmp_path: Path, template: str, options: dict[str, str], parser: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(template)
    command = a_command(tmp_path, **options)
    assert command.guided == GuidedDecoding(parser)
    given = " ".join(command.arguments).lower()
    assert (f"--tool_parser {parser}" in given) if parser else ("--tool_parser" not in given)
    assert b"guided_decoding_backend: xgrammar\n" in command.files["extra.yaml"]
