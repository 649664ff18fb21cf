"""Tools: what is told to the model, what it is held to, and what is read out of its text."""

import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from nodeagent.engine.core.step import Delta
from nodeagent.engine.sampling.sampler import Sampled
from nodeagent.engine.scheduler.sequence import Finish
from nodeagent.engine.server.request_body import ChatBody, messages_of, read_chat
from nodeagent.engine.server.response_body import Answer, Choice
from nodeagent.engine.server.tool_calling import Calling
from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.compiler import Grammars
from nodeagent.engine.tokenizer.chat_template import ChatTemplate
from nodeagent.engine.tools.call_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    QWEN_CODER,
    ToolFormat,
    format_of_template,
)
from nodeagent.engine.tools.call_parser import CallBegan, CallPiece, CallReader, Event, Said
from nodeagent.engine.tools.chat_tools import Tools, tools_of
from tests.unit.engine.test_constrain import GRAMMARS
from tests.unit.engine.test_text import VOCABULARY, byte_vocabulary

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


def asked(**fields: Any) -> Tools | None:
    read = body(**fields)
    return tools_of(read.tools, read.tool_choice, read.parallel_tool_calls)


def read(how: ToolFormat, text: str, letters: int) -> list[list[str]]:
    """Read `text` in pieces of so many letters; return what was said and called."""
    reader = CallReader(how, SCHEMAS)
    told: list[list[str]] = []
    pieces = [text[at : at + letters] for at in range(0, len(text), letters)]
    for event in [event for piece in pieces for event in reader.feed(piece)] + reader.flush():
        note(told, event)
    return told


def note(told: list[list[str]], event: Event) -> None:
    match event:
        case Said(text):
            if told and told[-1][0] == "":
                told[-1][1] += text
            else:
                told.append(["", text])
        case CallBegan(index, name):
            assert index == sum(1 for one in told if one[0])
            told.append([name, ""])
        case CallPiece(index, text):
            assert told[-1][0]
            assert index == sum(1 for one in told if one[0]) - 1
            told[-1][1] += text


FORMATS = [HERMES, QWEN_CODER, LLAMA3, MISTRAL]
CALL = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'
OUTPUTS: list[tuple[ToolFormat, str, list[list[str]]]] = [
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
@pytest.mark.parametrize(("how", "text", "wanted"), OUTPUTS, ids=[text for _, text, _ in OUTPUTS])
def test_calls_are_read_in_whatever_pieces_they_come(
    how: ToolFormat, text: str, wanted: list[list[str]], letters: int
) -> None:
    assert read(how, text, letters) == wanted


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
def test_what_a_model_writes_comes_out_again(
    how: ToolFormat, calls: list[tuple[str, Any, bool]], indent: int | None, letters: int
) -> None:
    written = []
    for name, arguments, name_first in calls:
        pairs = [("name", name), (how.arguments_key, arguments)]
        written.append(json.dumps(dict(pairs if name_first else pairs[::-1]), indent=indent))
    text = how.before + how.between.join(written) + how.after
    told = read(how, text, letters)
    assert [(name, json.loads(text)) for name, text in told] == [call[:2] for call in calls]


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
def test_a_parameter_written_as_text_is_of_the_type_that_the_schema_says(
    name: str, written: str, value: Any
) -> None:
    reader = CallReader(QWEN_CODER, {"f": DESCRIBED})
    whole = f"<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>"
    pieces = [event.text for event in reader.feed(whole) if isinstance(event, CallPiece)]
    assert json.loads("".join(pieces)) == {name: value}


def test_a_text_streams_while_it_is_written() -> None:
    reader = CallReader(QWEN_CODER, SCHEMAS)
    reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert reader.feed("Bon") == [CallPiece(0, "Bon")]
    assert reader.feed("n\n</") == [CallPiece(0, "n")]


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
def test_any_text_is_read_alike_in_all_pieces_and_content_is_never_lost(
    how: ToolFormat, parts: list[str], letters: int
) -> None:
    text = "".join(parts)
    told = read(how, text, letters)
    assert told == read(how, text, 1000)
    if all(name == "" for name, _ in told):
        assert "".join(said for _, said in told) == text


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
def test_a_choice_says_what_may_and_must_be_called(
    fields: dict[str, Any], names: set[str], must: bool, calls_max: int
) -> None:
    tools = asked(tools=TOOLS, **fields)
    assert tools is not None
    assert (set(tools.schemas), tools.must, tools.calls_max) == (names, must, calls_max)
    assert len(tools.told) == 2


def test_no_tools_or_none_to_call_is_plain_chat() -> None:
    assert asked() is None
    assert asked(tools=[], tool_choice="auto") is None
    assert asked(tools=TOOLS, tool_choice="none") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required"}, "any tool"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "without its field"),
        ({"tools": [TIME, TIME]}, "two tools"),
        ({"tools": [{"name": 'a"b'}]}, "name"),
        ({"tools": [{"type": "function"}]}, "without a function"),
        ({"tools": [{"name": f"f{n}"} for n in range(129)]}, "129 tools"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tools_that_cannot_be_used_are_refused_in_words(fields: dict[str, Any], said: str) -> None:
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


def test_a_name_nested_past_all_reason_is_no_call() -> None:
    text = f'{{"name": {100_000 * "["}{100_000 * "]"}, "parameters": {{}}}}'
    reader = CallReader(LLAMA3, {"a": {}})
    events = [*reader.feed(text), *reader.flush()]
    assert events == [Said(text)]


def test_a_template_that_knows_tools_is_given_them() -> None:
    template = ChatTemplate(KNOWING, "", "")
    tools = asked(tools=TOOLS)
    assert tools is not None
    text = template.render(messages_of(body(messages=HISTORY)), tools.told)
    listed, _, rest = text.partition("<tool_call>")
    assert [one["function"]["name"] for one in json.loads(listed)] == ["get_weather", "time.now"]
    assert rest == "Weather in Bonn?Bonnsunnycall_1"
    assert template.render(messages_of(body())) == "no<tool_call>hi"


def test_a_template_that_knows_none_is_told_in_words() -> None:
    template = ChatTemplate(PLAIN_TEMPLATE, "", "")
    tools = asked(tools=TOOLS)
    assert tools is not None
    text = template.render(messages_of(body(messages=HISTORY)), tools.told)
    assert text.startswith("[system]You may call functions")
    assert '"name": "get_weather"' in text
    assert (
        '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n'
        "</tool_call>\n[user]<tool_response>\nsunny\n</tool_response>"
    ) in text
    system = [{"role": "system", "content": "Be brief."}, *HISTORY]
    again = template.render(messages_of(body(messages=system)), tools.told)
    assert again.startswith("[system]Be brief.\n\nYou may call functions")
    begun = [{"role": "assistant", "content": "It is"}]
    chat = body(messages=begun, continue_final_message=True)
    assert template.render(messages_of(chat), tools.told).startswith("[system]You may call")


@pytest.mark.parametrize(
    ("template", "how"),
    [
        ("x", HERMES),
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("<tool_call>\n<function=' ~ name ~ '>\n<parameter=", QWEN_CODER),
        ("<function=' ~ name ~ '>' ~ arguments ~ '</function>", HERMES),
        ("{{ '<|python_tag|>' }}", LLAMA3),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, how: ToolFormat) -> None:
    assert format_of_template(template) is how


@pytest.mark.parametrize("how", FORMATS, ids=FORMATS.index)
def test_a_grammar_of_calls_allows_what_its_reader_reads(how: ToolFormat) -> None:
    tools = asked(tools=TOOLS, tool_choice="required")
    assert tools is not None
    wanted = tools.grammar(how, {}, None)
    assert wanted is not None
    one = f'{{"name": "get_weather", "{how.arguments_key}": {{"city": "Bonn"}}}}'
    two = f'{{"name": "time.now", "{how.arguments_key}": {{}}}}'
    for text, allowed in (
        (how.before + one + how.after, True),
        (how.before + one + how.between + two + how.after, True),
        (how.before + how.between.join([two] * 17) + how.after, False),
        (how.before + one.replace("Bonn", "Gelsenkirchen") + how.after, False),
        (how.before + one.replace("get_weather", "rm") + how.after, False),
        ("Hello", False),
    ):
        tokens = [*text.encode(), 256]
        assert (GRAMMARS.build(wanted).allowed(tokens) == len(tokens)) is allowed, text
    assert read(how, how.before + one + how.between + two + how.after, 3) == [
        ["get_weather", '{"city": "Bonn"}'],
        ["time.now", "{}"],
    ]


@pytest.mark.parametrize("letters", [1, 7, 1000])
@pytest.mark.parametrize("how", FORMATS, ids=FORMATS.index)
def test_who_wants_no_parallel_calls_is_told_one(how: ToolFormat, letters: int) -> None:
    tools = asked(tools=TOOLS, parallel_tool_calls=False)
    assert tools is not None
    reader = Calling(tools, how, {}).reader()
    one = f'{{"name": "time.now", "{how.arguments_key}": {{}}}}'
    text = how.before + one + how.between + one + how.after + " And more."
    told: list[list[str]] = []
    for at in range(0, len(text), letters):
        for event in reader.feed(text[at : at + letters]):
            note(told, event)
    assert reader.flush() == []
    assert told == [["time.now", "{}"]]


@pytest.mark.parametrize("how", FORMATS, ids=FORMATS.index)
@pytest.mark.parametrize("special", [False, True])
def test_a_strict_tool_may_be_left_alone_but_not_be_called_wrongly(
    how: ToolFormat, special: bool
) -> None:
    tools = asked(tools=[{"type": "function", "function": {**WEATHER, "strict": True}}])
    assert tools is not None
    marks = [how.opening] if special and how.opening else []
    vocabulary = byte_vocabulary(*marks)
    wanted = tools.grammar(how, dict.fromkeys(marks, 257), None)
    assert wanted is not None
    constraint = Grammars(vocabulary).build(wanted)
    call = f'{{"name": "get_weather", "{how.arguments_key}": {{"city": "Bonn"}}}}'
    speech = "Let me {see} a <b> [x]:\n" if how.opening else ""
    for text, allowed in (
        ("", True),
        ("It rains {in} [Bonn] <b>; <tool_cal", True),
        (how.before + call + how.after, True),
        (speech + how.before + call + how.between + call + how.after, True),
        (speech + how.before + call.replace("Bonn", "Gelsenkirchen") + how.after, False),
        (speech + how.before + call.replace("city", "town") + how.after, False),
        (speech + how.before + call.replace("get_weather", "rm") + how.after, False),
    ):
        tokens = [*vocabulary.encode(text, special=False), 256]
        assert (constraint.allowed(tokens) == len(tokens)) is allowed, text


def test_a_mark_that_is_a_special_token_is_shown_and_required() -> None:
    template = ChatTemplate("{{ '<end>' }}{{ '[TOOL_CALLS]' }}", "", "")
    tools = asked(tools=TOOLS, tool_choice="required")
    calling = Calling.of(tools, template, VOCABULARY)
    assert calling is not None
    assert calling.how is MISTRAL
    assert calling.shown == {}
    wanted = tools.grammar(MISTRAL, {"[TOOL_CALLS]": 256}, None) if tools else None
    assert wanted is not None
    assert wanted.start.startswith("<[256]> ")


def test_tools_beside_a_format_allow_either_and_must_allows_no_format() -> None:
    answer = grammar.of_schema({"const": 5}, "response_format")
    free = asked(tools=TOOLS)
    assert free is not None
    assert free.grammar(HERMES, {}, None) is None
    both = free.grammar(HERMES, {}, answer)
    assert both is not None
    call = '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
    for text in ("5", call):
        assert GRAMMARS.build(both).allowed(list(text.encode())) == len(text)
    must = asked(tools=TOOLS, tool_choice="required")
    assert must is not None
    with pytest.raises(ApiError, match="cannot obey both"):
        must.grammar(HERMES, {}, answer)


def test_a_strict_tool_is_called_in_no_way_that_is_not_held_to_its_schema() -> None:
    template = ChatTemplate("{{ '<tool_call><function=<parameter=' }}", "", "")
    said = "<function=get_weather><parameter=town>Bonn</parameter></function>"
    for strict in (False, True):
        tools = asked(tools=[{"type": "function", "function": {**WEATHER, "strict": strict}}])
        calling = Calling.of(tools, template, VOCABULARY)
        assert calling is not None
        reader = calling.reader()
        assert ([*reader.feed(said), *reader.flush()] == [Said(said)]) is strict


def answer_of(
    text: str, finish: Finish, *, stream: bool, how: ToolFormat = HERMES
) -> list[dict[str, Any]]:
    """Tell `text` letter by letter and return the frames' choices, or the one body's."""
    frames = frames_of(text, finish, how) if stream else []
    if stream:
        return [msgspec.json.decode(frame[6:])["choices"][0] for frame in frames]
    answer, deltas = told_of(text, finish, how)
    for delta in deltas:
        answer.collect(delta)
    return [msgspec.json.decode(answer.whole(1))["choices"][0]]


def frames_of(text: str, finish: Finish, how: ToolFormat) -> list[bytes]:
    answer, deltas = told_of(text, finish, how)
    return [frame for delta in deltas for frame in answer.chunks(delta)]


def told_of(text: str, finish: Finish, how: ToolFormat) -> tuple[Answer, list[Delta]]:
    ids = iter(f"call_{n}" for n in range(9))
    answer = Answer(
        "id",
        "m",
        0,
        chat=True,
        include_usage=False,
        logprobs=False,
        vocabulary=VOCABULARY,
        new_call_id=lambda: next(ids),
        choices=[Choice(0, CallReader(how, SCHEMAS))],
    )
    deltas = [Delta(1, letter, Sampled(0), 1, 0) for letter in text]
    deltas.append(Delta(1, "", None, 1, 0, finish))
    return answer, deltas


@pytest.mark.parametrize(
    ("how", "text"),
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
def test_calls_that_are_no_objects_are_put_together_by_the_openai_client(
    how: ToolFormat, text: str
) -> None:
    body = b"".join([*frames_of(text, Finish.STOP, how), b"data: [DONE]\n\n"])
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


def test_calls_are_told_in_openais_shape() -> None:
    text = f"Hm. <tool_call>\n{CALL}\n</tool_call>"
    (whole,) = answer_of(text, Finish.STOP, stream=False)
    function = {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert whole["message"] == {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert whole["finish_reason"] == "tool_calls"
    frames = answer_of(text, Finish.STOP, stream=True)
    calls = [frame["delta"]["tool_calls"][0] for frame in frames if "tool_calls" in frame["delta"]]
    begun = {"name": "get_weather", "arguments": ""}
    assert calls[0] == {"index": 0, "id": "call_0", "type": "function", "function": begun}
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert len(calls) > 5
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Bonn"}'
    assert "".join(frame["delta"].get("content", "") for frame in frames) == "Hm."
    assert frames[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_plain_text_tell_where_each_token_lies(stream: bool) -> None:
    answer = Answer(*("x", "m", 1, False, False, True, VOCABULARY, lambda: ""), choices=[Choice(0)])
    # The first bytes are held back: they may begin a stop string.
    said = [("", b"a"), ("", b"b"), ("abc", b"c"), ("d", b"d")]
    deltas = [
        Delta(1, text, Sampled(raw[0], -0.5, ((ord("z"), -0.1),)), 1, 0) for text, raw in said
    ]
    if stream:
        frames = [frame for delta in deltas for frame in answer.chunks(delta)]
        told = [msgspec.json.decode(frame[6:])["choices"][0]["logprobs"] for frame in frames]
    else:
        for delta in deltas:
            answer.collect(delta)
        told = [msgspec.json.decode(answer.whole(1))["choices"][0]["logprobs"]]
    assert [at for one in told for at in one["text_offset"]] == [0, 1, 2, 3]
    assert told[0]["top_logprobs"][0] == {"a": -0.5, "z": -0.1}


def test_a_call_cut_short_says_length_and_no_call_says_stop() -> None:
    (cut,) = answer_of(f"<tool_call>{CALL[:-8]}", Finish.LENGTH, stream=False)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] is None
    (plain,) = answer_of("No need.", Finish.STOP, stream=False)
    assert plain["finish_reason"] == "stop"
    assert plain["message"] == {"role": "assistant", "content": "No need."}
