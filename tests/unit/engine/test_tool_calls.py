"""Tools: their description in the prompt, the grammar of calls, and calls parsed from text."""

import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from nodeagent.engine.chat.call_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    QWEN_CODER,
    ToolCallFormat,
    call_format_of_template,
)
from nodeagent.engine.chat.call_parser import (
    CallArguments,
    CallStarted,
    ContentText,
    OutputEvent,
    ToolCallParser,
)
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.sampling.sampler import SampledToken
from nodeagent.engine.scheduler.sequence import FinishReason
from nodeagent.engine.server.openai.request_body import ChatBody, read_chat, template_messages
from nodeagent.engine.server.openai.response_body import CompletionResponse, ResponseChoice
from nodeagent.engine.server.openai.tool_fields import RequestTools, requested_tools
from nodeagent.engine.server.openai.tool_use import ToolUse
from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.compiler import GrammarCompiler
from tests.unit.engine.byte_vocabulary import VOCABULARY, accepts, byte_vocabulary
from tests.unit.engine.test_structured import COMPILER

WEATHER = {
    "name": "get_weather",
    "description": "Tell the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time.now", "parameters": {"type": "object", "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, TIME]
SCHEMAS: dict[str, Any] = {str(one["name"]): one["parameters"] for one in (WEATHER, TIME)}
NAMES = frozenset(SCHEMAS)


def body(**fields: Any) -> ChatBody:
    messages = fields.pop("messages", [{"role": "user", "content": "hi"}])
    return read_chat(json.dumps({"messages": messages, **fields}).encode(), 1_000_000)


def asked(**fields: Any) -> RequestTools | None:
    read = body(**fields)
    return requested_tools(read.tools, read.tool_choice, read.parallel_tool_calls)


def read(form: ToolCallFormat, text: str, letters: int) -> list[list[str]]:
    """Read `text` in pieces of so many letters; return what was said and called."""
    parser = ToolCallParser(form, SCHEMAS)
    events: list[list[str]] = []
    pieces = [text[at : at + letters] for at in range(0, len(text), letters)]
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.flush():
        note(events, event)
    return events


def note(events: list[list[str]], event: OutputEvent) -> None:
    match event:
        case ContentText(text):
            if events and events[-1][0] == "":
                events[-1][1] += text
            else:
                events.append(["", text])
        case CallStarted(index, name):
            assert index == sum(1 for one in events if one[0])
            events.append([name, ""])
        case CallArguments(index, text):
            assert events[-1][0]
            assert index == sum(1 for one in events if one[0]) - 1
            events[-1][1] += text


FORMATS = [HERMES, QWEN_CODER, LLAMA3, MISTRAL]
CALL = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'
OUTPUTS: list[tuple[ToolCallFormat, str, list[list[str]]]] = [
    (HERMES, "Hello < there\n", [["", "Hello < there\n"]]),
    (
        HERMES,
        f"Let me see. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n"
        '{"arguments": {"a": "}\\"{", "b": [1, {}]} , "name": "time.now"}\n</tool_call>\n',
        [
            ["", "Let me see."],
            ["get_weather", '{"city": "Bonn"}'],
            ["time.now", '{"a": "}\\"{", "b": [1, {}]}'],
        ],
    ),
    (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", [["get_weather", '{"city": "Bonn"}']] * 2),
    (HERMES, '<tool_call>{"name": "time.now"}</tool_call>', [["time.now", "{}"]]),
    (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rom\\"}"}</tool_call>',
        [["get_weather", '{"city": "Rom"}']],
    ),
    (HERMES, f"<tool_call>{CALL[:-5]}", [["get_weather", '{"city": "Bo']]),
    (HERMES, "a <tool_call>nothing", [["", "a <tool_call>nothing"]]),
    (HERMES, "a <tool_ca", [["", "a <tool_ca"]]),
    (
        HERMES,
        'x <tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [["", 'x <tool_call>{"name": "rm", "arguments": {}}</tool_call>']],
    ),
    (
        LLAMA3,
        '{"name": "get_weather", "parameters": {"city": "Ulm"}}; {"name": "time.now"}',
        [["get_weather", '{"city": "Ulm"}'], ["time.now", "{}"]],
    ),
    (
        LLAMA3,
        '<|python_tag|>{"type": "function", "name": "time.now", "parameters": {}}',
        [["time.now", "{}"]],
    ),
    (LLAMA3, ' {"answer": 42} ', [["", ' {"answer": 42} ']]),
    (LLAMA3, 'So: {"name": "time.now"}', [["", 'So: {"name": "time.now"}']]),
    (
        MISTRAL,
        f"Well [TOOL_CALLS] [{CALL}, {CALL}]",
        [["", "Well"]] + [["get_weather", '{"city": "Bonn"}']] * 2,
    ),
    (MISTRAL, "[1, 2]", [["", "[1, 2]"]]),
    (
        MISTRAL,
        'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "}{", "b": [{}]}[TOOL_CALLS]time.now[ARGS]{}',
        [["", "Well."], ["get_weather", '{"city": "}{", "b": [{}]}'], ["time.now", "{}"]],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Bonn"}\n',
        [["get_weather", '{"city": "Bonn"}']],
    ),
    (MISTRAL, '[TOOL_CALLS]time.now {"a": 1', [["time.now", '{"a": 1']]),
    (MISTRAL, "[TOOL_CALLS]rm[ARGS]{} so", [["", "[TOOL_CALLS]rm[ARGS]{} so"]]),
    (MISTRAL, "[TOOL_CALLS]time.now is it", [["", "[TOOL_CALLS]time.now is it"]]),
    (MISTRAL, "[TOOL_CALLS]time.now[ARGS]", [["", "[TOOL_CALLS]time.now[ARGS]"]]),
    (
        QWEN_CODER,
        'Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBo"n\\n\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n"
        "</tool_call>",
        [["", "Let me see."], ["get_weather", '{"city": "Bo\\"n\\\\n"}'], ["time.now", "{}"]],
    ),
    (
        # What a text holds of tags or of blank lines is its own; only two line breaks are not.
        QWEN_CODER,
        "<tool_call><function=get_weather><parameter=city>\n\n<p>1 < 2</p>\n\n</parameter>"
        "<parameter=unheard of>\n5\n</parameter></function></tool_call>",
        [["get_weather", '{"city": "\\n<p>1 < 2</p>\\n", "unheard of": "5"}']],
    ),
    (
        # Some forget the opening, some what closes a parameter or the function.
        QWEN_CODER,
        "Well:\n<function=get_weather>\n<parameter=city>\nBonn\n<parameter=b>c</function>"
        "\n</tool_call>",
        [["", "Well:"], ["get_weather", '{"city": "Bonn", "b": "c"}']],
    ),
    (
        QWEN_CODER,
        "<tool_call><function=time.now>so it is</tool_call> "
        "<tool_call><function=time.now></function>",
        [["time.now", "{}"]] * 2,
    ),
    (QWEN_CODER, f"<tool_call>\n{CALL}\n</tool_call>", [["get_weather", '{"city": "Bonn"}']]),
    (
        QWEN_CODER,
        "<tool_call><function=rm>\n</function>",
        [["", "<tool_call><function=rm>\n</function>"]],
    ),
    (QWEN_CODER, "2 <function", [["", "2 <function"]]),
    (
        # What is no call hides none behind it.
        QWEN_CODER,
        "<function=x> <tool_call><function=time.now></function>",
        [["", "<function=x>"], ["time.now", "{}"]],
    ),
    (
        MISTRAL,
        "[TOOL_CALLS]rm[TOOL_CALLS]time.now[ARGS]{}",
        [["", "[TOOL_CALLS]rm"], ["time.now", "{}"]],
    ),
    (
        QWEN_CODER,
        "<function=get_weather><parameter=city>Bo</par",
        [["get_weather", '{"city": "Bo']],
    ),
    (HERMES, "a <function=time.now></function>", [["", "a <function=time.now></function>"]]),
]


@pytest.mark.parametrize("letters", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "expected"), OUTPUTS, ids=[text for _, text, _ in OUTPUTS]
)
def test_calls_are_parsed_however_the_text_is_split(
    form: ToolCallFormat, text: str, expected: list[list[str]], letters: int
) -> None:
    assert read(form, text, letters) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.text(max_size=5), JSON, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1]),
    st.integers(1, 9),
)
def test_generated_calls_are_parsed_back(
    form: ToolCallFormat,
    calls: list[tuple[str, Any, bool]],
    indent: int | None,
    letters: int,
) -> None:
    written = []
    for name, arguments, name_first in calls:
        pairs = [("name", name), (form.arguments_key, arguments)]
        written.append(json.dumps(dict(pairs if name_first else pairs[::-1]), indent=indent))
    text = form.start + form.separator.join(written) + form.end
    events = read(form, text, letters)
    assert [(name, json.loads(text)) for name, text in events] == [call[:2] for call in calls]


DESCRIBED: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "word": {"enum": ["1", "null"]},
        "whole": {"type": "integer"},
        "number": {"type": ["number", "null"]},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/a~1b"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "any": {},
        "odd": {"type": {"type": []}, "enum": 5, "anyOf": None, "$ref": "#/$defs/odd"},
    },
    "$defs": {
        "a/b": {"allOf": [{"$ref": "#/$defs/c"}]},
        "c": {"type": "object"},
        "odd": {"$ref": "#/$defs/odd"},
    },
}
VALUES: list[tuple[str, str, Any]] = [
    ("text", "5", "5"),
    ("text", "null", "null"),
    ("text", " é\n\tx ", " é\n\tx "),
    ("word", "1", "1"),
    ("whole", "5", 5),
    ("whole", " -5\n", -5),
    ("whole", "5.5", "5.5"),
    ("whole", "True", "True"),
    ("whole", "9" * 400, int("9" * 400)),
    ("number", "5", 5),
    ("number", "-0.5e3", -500.0),
    ("number", "NaN", "NaN"),
    ("number", "None", None),
    ("flag", "True", True),
    ("flag", "false", False),
    ("flag", "1", "1"),
    ("list", "[1, 2]", [1, 2]),
    ("list", "[1, 2", "[1, 2"),
    ("list", "[" * 100_000, "[" * 100_000),
    ("place", '{"a": [1]}', {"a": [1]}),
    ("place", "Bonn", "Bonn"),
    ("either", "5", 5),
    ("either", '"5"', '"5"'),
    ("any", "5", "5"),
    ("odd", "5", "5"),
    ("undescribed", "[5]", "[5]"),
]


@pytest.mark.parametrize(("name", "written", "value"), VALUES, ids=lambda one: repr(one)[:20])
def test_a_parameter_written_as_text_gets_the_type_of_its_schema(
    name: str, written: str, value: Any
) -> None:
    parser = ToolCallParser(QWEN_CODER, {"f": DESCRIBED})
    whole = f"<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>"
    pieces = [event.text for event in parser.feed(whole) if isinstance(event, CallArguments)]
    assert json.loads("".join(pieces)) == {name: value}


def test_a_string_parameter_streams() -> None:
    parser = ToolCallParser(QWEN_CODER, SCHEMAS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.feed("Bon") == [CallArguments(0, "Bon")]
    assert parser.feed("n\n</") == [CallArguments(0, "n")]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", '"', '"name"', ":", "[", "]",
             '"get_weather"', '"arguments"', ",", " ", "\n", "\\", "x", "<|python_tag|>", CALL,
             "<function=", "<function=get_weather>", "time.now", "get_weather", ">", "<parameter=",
             "</parameter>", "</function>", "[ARGS]"]
        ),
        max_size=14,
    ),
    st.integers(1, 5),
)  # fmt: skip
def test_any_text_is_parsed_alike_however_split_and_no_content_is_lost(
    form: ToolCallFormat, parts: list[str], letters: int
) -> None:
    text = "".join(parts)
    events = read(form, text, letters)
    assert events == read(form, text, 1000)
    if all(name == "" for name, _ in events):
        assert "".join(said for _, said in events) == text


@pytest.mark.parametrize(
    ("fields", "names", "must", "calls_max"),
    [
        ({}, NAMES, False, 16),
        ({"tool_choice": "auto"}, NAMES, False, 16),
        ({"tool_choice": "required"}, NAMES, True, 16),
        ({"tool_choice": "required", "parallel_tool_calls": False}, NAMES, True, 1),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time.now"}}},
            {"time.now"}, True, 1,
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_weather"}}]}}},
            {"get_weather"}, True, 16,
        ),
    ],
    ids=["nothing", "auto", "required", "one", "named", "allowed"],
)  # fmt: skip
def test_tool_choice_selects_what_may_and_must_be_called(
    fields: dict[str, Any], names: set[str], must: bool, calls_max: int
) -> None:
    tools = asked(tools=TOOLS, **fields)
    assert tools is not None
    assert (set(tools.schemas), tools.must_call, tools.calls_max) == (names, must, calls_max)
    assert len(tools.described) == 2


def test_without_callable_tools_a_chat_is_plain() -> None:
    assert asked() is None
    assert asked(tools=[], tool_choice="auto") is None
    assert asked(tools=TOOLS, tool_choice="none") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "needs the field 'function'"),
        ({"tools": [TIME, TIME]}, "two tools"),
        ({"tools": [{"name": 'a"b'}]}, "name"),
        ({"tools": [{"type": "function"}]}, "needs a 'function'"),
        ({"tools": [{"name": f"f{n}"} for n in range(129)]}, "129 tools"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_tools_are_refused_with_a_message(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        asked(**fields)


PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '\n' }}{% endfor %}"
KNOWING = (
    "{{ tools | tojson if tools else 'no' }}<tool_call>{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    "{{ m.content }}{{ m.tool_call_id }}{% endfor %}"
)
HISTORY = [
    {"role": "user", "content": "Weather in Bonn?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def test_a_deeply_nested_name_is_not_a_call() -> None:
    text = f'{{"name": {100_000 * "["}{100_000 * "]"}, "parameters": {{}}}}'
    parser = ToolCallParser(LLAMA3, {"a": {}})
    events = [*parser.feed(text), *parser.flush()]
    assert events == [ContentText(text)]


def test_a_template_that_mentions_tools_gets_them() -> None:
    template = ChatTemplate(KNOWING, "", "")
    tools = asked(tools=TOOLS)
    assert tools is not None
    text = template.render(template_messages(body(messages=HISTORY)), tools.described)
    listed, _, rest = text.partition("<tool_call>")
    assert [one["function"]["name"] for one in json.loads(listed)] == ["get_weather", "time.now"]
    assert rest == "Weather in Bonn?Bonnsunnycall_1"
    assert template.render(template_messages(body())) == "no<tool_call>hi"


def test_a_template_without_tools_gets_them_as_text() -> None:
    template = ChatTemplate(PLAIN_TEMPLATE, "", "")
    tools = asked(tools=TOOLS)
    assert tools is not None
    text = template.render(template_messages(body(messages=HISTORY)), tools.described)
    assert text.startswith("[system]You may call functions")
    assert '"name": "get_weather"' in text
    assert (
        '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n'
        "</tool_call>\n[user]<tool_response>\nsunny\n</tool_response>"
    ) in text
    system = [{"role": "system", "content": "Be brief."}, *HISTORY]
    again = template.render(template_messages(body(messages=system)), tools.described)
    assert again.startswith("[system]Be brief.\n\nYou may call functions")
    begun = [{"role": "assistant", "content": "It is"}]
    chat = body(messages=begun, continue_final_message=True)
    assert template.render(template_messages(chat), tools.described).startswith(
        "[system]You may call"
    )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("x", HERMES),
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("<tool_call>\n<function=' ~ name ~ '>\n<parameter=", QWEN_CODER),
        ("<function=' ~ name ~ '>' ~ arguments ~ '</function>", HERMES),
        ("{{ '<|python_tag|>' }}", LLAMA3),
    ],
)
def test_the_template_determines_the_call_format(template: str, form: ToolCallFormat) -> None:
    assert call_format_of_template(template) is form


@pytest.mark.parametrize("form", FORMATS, ids=FORMATS.index)
def test_the_grammar_of_calls_allows_what_the_parser_parses(form: ToolCallFormat) -> None:
    tools = asked(tools=TOOLS, tool_choice="required")
    assert tools is not None
    expected = tools.grammar(form, {}, None)
    assert expected is not None
    one = f'{{"name": "get_weather", "{form.arguments_key}": {{"city": "Bonn"}}}}'
    two = f'{{"name": "time.now", "{form.arguments_key}": {{}}}}'
    for text, allowed in (
        (form.start + one + form.end, True),
        (form.start + one + form.separator + two + form.end, True),
        (form.start + form.separator.join([two] * 17) + form.end, False),
        (form.start + one.replace("Bonn", "Gelsenkirchen") + form.end, False),
        (form.start + one.replace("get_weather", "rm") + form.end, False),
        ("Hello", False),
    ):
        taken = accepts(COMPILER.compile_now(expected), [*text.encode(), 256])
        assert taken is allowed, text
    assert read(form, form.start + one + form.separator + two + form.end, 3) == [
        ["get_weather", '{"city": "Bonn"}'],
        ["time.now", "{}"],
    ]


@pytest.mark.parametrize("letters", [1, 7, 1000])
@pytest.mark.parametrize("form", FORMATS, ids=FORMATS.index)
def test_without_parallel_calls_only_the_first_is_emitted(
    form: ToolCallFormat, letters: int
) -> None:
    tools = asked(tools=TOOLS, parallel_tool_calls=False)
    assert tools is not None
    parser = ToolUse(tools, form, {}).parser()
    one = f'{{"name": "time.now", "{form.arguments_key}": {{}}}}'
    text = form.start + one + form.separator + one + form.end + " And more."
    events: list[list[str]] = []
    for at in range(0, len(text), letters):
        for event in parser.feed(text[at : at + letters]):
            note(events, event)
    assert parser.flush() == []
    assert events == [["time.now", "{}"]]


@pytest.mark.parametrize("form", FORMATS, ids=FORMATS.index)
@pytest.mark.parametrize("special", [False, True])
def test_a_strict_tool_need_not_be_called_but_cannot_be_called_wrongly(
    form: ToolCallFormat, special: bool
) -> None:
    tools = asked(tools=[{"type": "function", "function": {**WEATHER, "strict": True}}])
    assert tools is not None
    marks = [form.opening] if special and form.opening else []
    vocabulary = byte_vocabulary(*marks)
    expected = tools.grammar(form, dict.fromkeys(marks, 257), None)
    assert expected is not None
    constraint = GrammarCompiler(vocabulary).compile_now(expected)
    call = f'{{"name": "get_weather", "{form.arguments_key}": {{"city": "Bonn"}}}}'
    speech = "Let me {see} a <b> [x]:\n" if form.opening else ""
    for text, allowed in (
        ("", True),
        ("It rains {in} [Bonn] <b>; <tool_cal", True),
        (form.start + call + form.end, True),
        (speech + form.start + call + form.separator + call + form.end, True),
        (
            speech + form.start + call.replace("Bonn", "Gelsenkirchen") + form.end,
            False,
        ),
        (speech + form.start + call.replace("city", "town") + form.end, False),
        (speech + form.start + call.replace("get_weather", "rm") + form.end, False),
    ):
        tokens = [*vocabulary.encode(text, special=False), 256]
        assert accepts(constraint.copy(), tokens) is allowed, text


def test_a_mark_that_is_a_special_token_is_visible_and_required() -> None:
    template = ChatTemplate("{{ '<end>' }}{{ '[TOOL_CALLS]' }}", "", "")
    tools = asked(tools=TOOLS, tool_choice="required")
    calling = ToolUse.of(tools, template, VOCABULARY)
    assert calling is not None
    assert calling.call_format is MISTRAL
    assert calling.visible_special == {}
    expected = tools.grammar(MISTRAL, {"[TOOL_CALLS]": 256}, None) if tools else None
    assert expected is not None
    assert expected.start.startswith("<[256]> ")


def test_tools_with_a_response_format_allow_either_unless_a_call_is_required() -> None:
    answer = grammar.json_schema_grammar({"const": 5}, "response_format")
    free = asked(tools=TOOLS)
    assert free is not None
    assert free.grammar(HERMES, {}, None) is None
    both = free.grammar(HERMES, {}, answer)
    assert both is not None
    call = '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
    for text in ("5", call):
        assert accepts(COMPILER.compile_now(both), text.encode())
    must = asked(tools=TOOLS, tool_choice="required")
    assert must is not None
    # Clients send both: the call is what the client gets.
    required = must.grammar(HERMES, {}, answer)
    assert required is not None
    assert accepts(COMPILER.compile_now(required), call.encode())
    assert not accepts(COMPILER.compile_now(required), b"5")
    guided = grammar.json_schema_grammar({"const": 5}, "guided_json")
    with pytest.raises(ApiError, match="that requires a call"):
        must.grammar(HERMES, {}, guided)


def test_a_strict_tool_cannot_be_called_in_an_unconstrained_format() -> None:
    template = ChatTemplate("{{ '<tool_call><function=<parameter=' }}", "", "")
    said = "<function=get_weather><parameter=town>Bonn</parameter></function>"
    for strict in (False, True):
        tools = asked(tools=[{"type": "function", "function": {**WEATHER, "strict": strict}}])
        calling = ToolUse.of(tools, template, VOCABULARY)
        assert calling is not None
        parser = calling.parser()
        assert ([*parser.feed(said), *parser.flush()] == [ContentText(said)]) is strict


def answer_of(
    text: str, finish: FinishReason, *, stream: bool, parser: ToolCallParser | None = None
) -> list[dict[str, Any]]:
    """Tell `text` letter by letter and return the frames' choices, or the one body's."""
    parser = parser or ToolCallParser(HERMES, SCHEMAS)
    frames = frames_of(text, finish, parser) if stream else []
    if stream:
        return [msgspec.json.decode(frame[6:])["choices"][0] for frame in frames]
    answer, deltas = told_of(text, finish, parser)
    for delta in deltas:
        answer.collect(delta)
    return [msgspec.json.decode(answer.complete_body(1))["choices"][0]]


def frames_of(text: str, finish: FinishReason, parser: ToolCallParser) -> list[bytes]:
    answer, deltas = told_of(text, finish, parser)
    return [frame for delta in deltas for frame in answer.chunks(delta)]


def told_of(
    text: str, finish: FinishReason, parser: ToolCallParser
) -> tuple[CompletionResponse, list[GenerationDelta]]:
    ids = iter(f"call_{n}" for n in range(9))
    answer = CompletionResponse(
        "id",
        "m",
        0,
        chat=True,
        include_usage=False,
        logprobs=False,
        vocabulary=VOCABULARY,
        new_call_id=lambda: next(ids),
        choices=[ResponseChoice(0, parser)],
    )
    deltas = [GenerationDelta(1, letter, SampledToken(0), 1, 0) for letter in text]
    deltas.append(GenerationDelta(1, "", None, 1, 0, finish))
    return answer, deltas


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            QWEN_CODER,
            "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n</tool_call>",
        ),
        (MISTRAL, 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]time.now[ARGS]{}'),
    ],
    ids=["tags", "named"],
)
def test_tagged_and_named_calls_are_assembled_by_the_openai_client(
    form: ToolCallFormat, text: str
) -> None:
    parser = ToolCallParser(form, SCHEMAS)
    body = b"".join([*frames_of(text, FinishReason.STOP, parser), b"data: [DONE]\n\n"])
    served = httpx2.MockTransport(
        lambda _: httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})
    )
    client = openai.OpenAI(
        base_url="http://x/v1", api_key="x", http_client=httpx2.Client(transport=served)
    )
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="m", messages=messages) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Hm."
    called = [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    ]
    assert called == [("get_weather", '{"city": "Bonn"}'), ("time.now", "{}")]


def test_calls_have_the_shape_of_openai() -> None:
    text = f"Hm. <tool_call>\n{CALL}\n</tool_call>"
    (whole,) = answer_of(text, FinishReason.STOP, stream=False)
    function = {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert whole["message"] == {
        "role": "assistant",
        "content": "Hm.",
        "refusal": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert whole["finish_reason"] == "tool_calls"
    frames = answer_of(text, FinishReason.STOP, stream=True)
    calls = [frame["delta"]["tool_calls"][0] for frame in frames if "tool_calls" in frame["delta"]]
    begun = {"name": "get_weather", "arguments": ""}
    assert calls[0] == {"index": 0, "id": "call_0", "type": "function", "function": begun}
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert len(calls) > 5
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Bonn"}'
    assert "".join(frame["delta"].get("content", "") for frame in frames) == "Hm."
    assert frames[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions_have_text_offsets(stream: bool) -> None:
    answer = CompletionResponse(
        *("x", "m", 1, False, False, True, VOCABULARY, lambda: ""), choices=[ResponseChoice(0)]
    )
    # The first bytes are held back: they may begin a stop string.
    said = [("", b"a"), ("", b"b"), ("abc", b"c"), ("d", b"d")]
    deltas = [
        GenerationDelta(1, text, SampledToken(raw[0], -0.5, ((ord("z"), -0.1),)), 1, 0)
        for text, raw in said
    ]
    if stream:
        frames = [frame for delta in deltas for frame in answer.chunks(delta)]
        events = [msgspec.json.decode(frame[6:])["choices"][0]["logprobs"] for frame in frames]
    else:
        for delta in deltas:
            answer.collect(delta)
        events = [msgspec.json.decode(answer.complete_body(1))["choices"][0]["logprobs"]]
    assert [at for one in events for at in one["text_offset"]] == [0, 1, 2, 3]
    assert events[0]["top_logprobs"][0] == {"a": -0.5, "z": -0.1}


def test_a_truncated_call_finishes_with_length_and_plain_text_with_stop() -> None:
    (cut,) = answer_of(f"<tool_call>{CALL[:-8]}", FinishReason.LENGTH, stream=False)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] is None
    (plain,) = answer_of("No need.", FinishReason.STOP, stream=False)
    assert plain["finish_reason"] == "stop"
    assert plain["message"] == {"role": "assistant", "content": "No need.", "refusal": None}


NAMED_CALL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("form", FORMATS, ids=FORMATS.index)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": NAMED_CALL},
        {"tools": TOOLS[:1], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
    ids=["named", "only", "any"],
)
def test_a_required_call_that_is_cut_anywhere_is_a_call_and_no_content(
    form: ToolCallFormat, fields: dict[str, Any]
) -> None:
    """An output that `max_tokens` ended before the call's name had its mark as its content."""
    tools = asked(**fields)
    assert tools is not None
    arguments = '{"city": "Bonn"}'
    call = f'{{"name": "get_weather", "{form.arguments_key}": {arguments}}}'
    text = f"\n{form.start}{call}{form.separator}{call}"
    named_at = text.index("get_weather") + len("get_weather") + 2
    for cut in range(len(text) + 1):
        parser = ToolUse(tools, form, {}).parser()
        events: list[list[str]] = []
        for event in [*parser.feed(text[:cut]), *parser.flush()]:
            note(events, event)
        is_named = cut >= named_at or (len(tools.callable) == 1 and bool(text[:cut].strip()))
        assert bool(events) == is_named, text[:cut]
        for name, begun in events:
            assert (name, arguments.startswith(begun)) == ("get_weather", True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_cut_before_its_arguments_has_the_shape_of_openai(stream: bool) -> None:
    tools = asked(tools=TOOLS, tool_choice=NAMED_CALL)
    assert tools is not None
    parser = ToolUse(tools, HERMES, {}).parser()
    choices = answer_of("\n<tool_call>", FinishReason.LENGTH, stream=stream, parser=parser)
    assert choices[-1]["finish_reason"] == "length"
    message = choices[0]["delta" if stream else "message"]
    assert message.get("content") is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ""}
