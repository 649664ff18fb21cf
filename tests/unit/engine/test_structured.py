"""Structured outputs: samples obey their grammars, and hostile grammars are refused."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from isochrone.wire.engines.schema_numbers import NUMBER_MIN
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.sampling.sampler import InvalidLogits, SampledToken, Sampler, SamplingParams
from nodeagent.engine.server.openai.request_body import ChatBody, read_chat
from nodeagent.engine.server.openai.structured_fields import requested_grammar
from nodeagent.engine.structured import compiler as compiler_module
from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.compiler import GrammarCompiler
from nodeagent.engine.structured.grammar import Grammar, GrammarError
from ops.fuzz import grammars
from tests.unit.engine.byte_vocabulary import VOCABULARY, accepts
from tests.unit.engine.test_sampling import sample_rows

END = 256
COMPILER = GrammarCompiler(VOCABULARY)
HI = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> ChatBody:
    return read_chat(json.dumps({"messages": HI, **fields}).encode(), 10_000_000)


def write(wanted: Grammar, seed: int = 0, tokens_max: int = 400, **knobs: Any) -> str | None:
    """Sample from noise under `wanted`; None where the tokens ran out before the end."""
    params = SamplingParams(seed=seed, **knobs)
    sampler = Sampler(params, [], COMPILER.compile_now(wanted))
    noise = torch.Generator().manual_seed(seed)
    message: list[int] = []
    while len(message) < tokens_max:
        # Ends and closing marks are likely, so that most outputs come to an end.
        logits = torch.randn(257, generator=noise)
        logits[[END, *b'"}],']] += 4
        (result,) = sample_rows(logits[None], [sampler])
        assert isinstance(result, SampledToken), result
        if result.token == END:
            return bytes(message).decode()
        message.append(result.token)
    return None


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_samples_are_json_of_the_schema(seed: int) -> None:
    text = write(grammar.json_schema_grammar(PERSON, "x"), seed)
    if text is not None:
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert isinstance(value["name"], str)
        assert type(value["age"]) is int


def written_so(wanted: Grammar, text: str) -> str:
    """Write `text` as far as the grammar allows."""
    sampler = Sampler(SamplingParams(temperature=0), [], COMPILER.compile_now(wanted))
    for at, byte in enumerate((*text.encode(), END)):
        logits = torch.zeros(257)
        logits[byte] = 1.0
        (result,) = sample_rows(logits[None], [sampler])
        assert isinstance(result, SampledToken), result
        if result.token != byte:
            return text[:at]
    return text


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_json_may_be_indented_but_not_mostly_white_space(ends: str) -> None:
    person = grammar.json_schema_grammar(PERSON, "x")
    for indent in (None, 2, 8, "\t"):
        text = json.dumps({"name": "Ada", "age": 36}, indent=indent).replace("\n", ends)
        assert written_so(person, text) == text
    for blank in (" ", f"{ends}{32 * ' '}", ends + 8 * "\t"):
        assert written_so(person, f'{{{blank}"') == f'{{{blank}"'
        for more in (" ", "\t", ends):
            assert written_so(person, f"{{{blank}{more}") == f"{{{blank}"


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_json_object_mode_gives_an_object(seed: int) -> None:
    text = write(grammar.json_object_grammar("x"), seed)
    if text is not None:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "pattern", [r"\d{3}-\d{4}", r"(a|b/c)+x", "[^\n]{2}\n", r"a\/b", "^ok$", r"\\/"]
)
def test_a_regex_matches_the_whole_output(pattern: str) -> None:
    text = write(grammar.regex_grammar(pattern, "x"), tokens_max=200)
    assert text is not None
    assert re.fullmatch(pattern, text)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_the_output_is_one_of_the_choices_whatever_they_contain(choices: list[str]) -> None:
    assert write(grammar.choice_grammar(choices, "x"), tokens_max=10_000) in choices


@pytest.mark.parametrize(
    "text", ['a" | "b', "\n", "\\", "<[2]>", "%json {}", "\x7f\x85\u2028", "/"]
)
def test_a_choice_is_never_read_as_a_grammar_rule(text: str) -> None:
    assert write(grammar.choice_grammar([text], "x")) == text


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[tuple[Any, str]] = [
    (deep(500), "levels deep"),
    ({"properties": {str(n): {} for n in range(1001)}}, "properties"),
    ({"enum": ["x" * 100 + str(n) for n in range(1000)]}, "bytes"),
    ({"$ref": "#"}, "no output can satisfy it"),
    ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "circular"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
    ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "Unsatisfiable"),
    ({"not": {}}, "Unimplemented"),
    ({"type": "wizard"}, "Invalid type"),
    ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
    ({"type": "string", "maxLength": 1e30}, "maxLength"),
    ({"const": "\ud800"}, "hex escape"),
    ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]},
     "too large"),
    ({"items": [{"multipleOf": 999999937}]}, "without their zeros add up to 999999937"),
    ({"items": [{"multipleOf": -0.99991}, {"multipleOf": 10**5000}]}, "add up to 99992"),
    # Compiling these takes time and memory that no limit of the compiler stops: it had not ended
    # after 40 s with 22 patterns, nor after 190 s with 40.
    ({"allOf": [{"pattern": f"(a|b){{{n},{n + 40}}}"} for n in range(16)]}, "match 16 different"),
    ({"$ref": "#/$defs/15", "$defs": {
        f"{n}": {"pattern": f"(a|b){{{n},{n + 40}}}", **({"$ref": f"#/$defs/{n - 1}"} if n else {})}
        for n in range(16)}}, "match 16 different"),
    ({"allOf": [{"multipleOf": 149}, {"multipleOf": 1.51}]}, "common multiple"),
    ({"patternProperties": {f"^{n}$": {} for n in range(101)}}, "101 entries in"),
    # These ended the process, with each request that came with one of them.
    ({"const": -(2**63)}, "a number below"),
    ({"properties": {"a": {"enum": [1, {"b": 512 - 2**63}]}}}, "a number below"),
    ({"type": "integer", "minimum": -1e19, "maximum": -(10**20)}, "a number below"),
    (False, "a JSON schema must be an object"),
    ([], "a JSON schema must be an object"),
    (3, "a JSON schema must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_an_unusable_schema_is_refused_with_a_message(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        COMPILER.compile_now(grammar.json_schema_grammar(schema, "response_format"))
    assert str(caught.value).startswith("cannot use field 'response_format': ")
    assert "\n" not in str(caught.value)


def test_patterns_of_different_values_are_not_joined() -> None:
    kinds = {f"k{n}": {"type": "string", "pattern": f"^{n}[ab]{{1,4}}$"} for n in range(20)}
    fields = {name: {"allOf": [{"$ref": f"#/$defs/{name}"}], "title": name} for name in kinds}
    schema = {"type": "object", "properties": fields, "required": ["k7"], "$defs": kinds}
    text = write(grammar.json_schema_grammar(schema, "x"), tokens_max=1000)
    assert text is None or re.fullmatch("7[ab]{1,4}", json.loads(text)["k7"])


def test_random_schemas_and_patterns_compile_or_are_refused() -> None:
    """Longer: `python -m ops.fuzz.grammars 600`, where a case may end the process."""
    came = [
        grammars.run_case(COMPILER, grammars.case_of(1, number), number) for number in range(200)
    ]
    assert min(came.count("written"), came.count("refused")) > 20


@pytest.mark.parametrize("number", [NUMBER_MIN, 2**63 - 1, -(10**18), 1e15])
def test_the_largest_numbers_of_a_schema_can_be_written(number: float) -> None:
    wanted = grammar.json_schema_grammar({"const": number}, "response_format")
    assert json.loads(write(wanted) or "") == number


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
        {"type": "string", "pattern": "(a|b)*a(a|b){20}"},
        {"type": "integer", "multipleOf": 7919},
        {"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"next": {"$ref": "#/$defs/d"}}}}},
        {"x-guidance": {"whitespace_pattern": "(a{1,1000}){1,1000}"}, "type": "object"},
    ],
    ids=str,
)
def test_an_expensive_schema_ends_at_its_token_limit_or_with_an_error(schema: Any) -> None:
    sampler = Sampler(
        SamplingParams(seed=1), [], COMPILER.compile_now(grammar.json_schema_grammar(schema, "x"))
    )
    for _ in range(100):
        (result,) = sample_rows(torch.zeros(1, 257), [sampler])
        if isinstance(result, InvalidLogits):
            assert str(result).startswith("cannot continue with this grammar")
            return
        if result.token == END:
            return


def test_unenforceable_keywords_pass_if_strict_is_false() -> None:
    loose = {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "maxItems": 2}
    with pytest.raises(GrammarError, match="uniqueItems"):
        COMPILER.compile_now(grammar.json_schema_grammar(loose, "x"))
    assert write(grammar.json_schema_grammar(loose, "x", lenient=True)) is not None


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"enum": ["a"]}}}, '"a"', "1"),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "n", "schema": {"const": 5}}}},
            "5", "6",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "[1]", "x"),
        ({"guided_json": {"type": "integer"}}, "12", "a"),
        ({"guided_json": '{"type": "integer"}'}, "12", "a"),
        ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "null", "0"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "x+"}}, "xx", ""),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
    ],
    ids=str,
)  # fmt: skip
def test_all_request_fields_give_the_same_grammar(
    fields: dict[str, Any], good: str, bad: str
) -> None:
    wanted = requested_grammar(body(**fields))
    assert wanted is not None
    for text, allowed in ((good, True), (bad, False)):
        constraint = COMPILER.compile_now(wanted)
        assert accepts(constraint, [*text.encode(), END]) is allowed


def test_response_format_text_has_no_grammar() -> None:
    assert requested_grammar(body()) is None
    assert requested_grammar(body(response_format={"type": "text"}, structured_outputs={})) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": {"type": "json_schema"}}, "a JSON schema must be an object"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "give one of them",
        ),
        ({"guided_choice": ["a"], "guided_json": {}}, "give one of them"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar"),
        ({"guided_json": "{"}, "is not JSON"),
        ({"guided_choice": []}, "choices"),
        ({"guided_choice": [""]}, "choice must not be empty"),
        ({"guided_choice": ["x"] * 2000}, "choices"),
        ({"guided_choice": ["\ud800"]}, "cannot"),
        ({"guided_regex": "a" * 5000}, "characters"),
        ({"guided_regex": "a\\"}, "backslash"),
    ],
    ids=str,
)
def test_invalid_fields_are_refused_with_a_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        requested_grammar(body(**fields))


def test_seeds_and_logprobs_keep_their_meaning_under_a_constraint() -> None:
    wanted = grammar.json_schema_grammar(PERSON, "x")
    assert write(wanted, 7) == write(wanted, 7)
    sampler = Sampler(
        SamplingParams(temperature=0, logprobs=1),
        [],
        COMPILER.compile_now(grammar.choice_grammar(["z"], "x")),
    )
    logits = torch.zeros(1, 257)
    logits[0, 65] = 3.0
    (told,) = sample_rows(logits.clone(), [sampler])
    assert isinstance(told, SampledToken)
    assert told.token == ord("z")
    assert told.top[0][0] == 65
    assert told.logprob == pytest.approx(float(logits[0].log_softmax(-1)[ord("z")]))


def test_a_failed_constraint_does_not_affect_other_sequences() -> None:
    free = Sampler(SamplingParams(temperature=0), [])
    held = Sampler(
        SamplingParams(temperature=0), [], COMPILER.compile_now(grammar.choice_grammar(["a"], "x"))
    )
    assert held.constraint is not None
    with pytest.raises(Exception, match="cannot continue"):
        held.constraint.accept(ord("z"))
    first, second = sample_rows(torch.zeros(2, 257), [held, free])
    assert isinstance(first, InvalidLogits)
    assert isinstance(second, SampledToken)


def test_looking_ahead_drafts_forced_tokens_and_does_not_advance() -> None:
    constraint = COMPILER.compile_now(grammar.choice_grammar(["left", "lever"], "x"))

    def nothing(draft: list[int]) -> None:
        return None

    def a_v(draft: list[int]) -> int:
        return ord("v")

    def a_z(draft: list[int]) -> int:
        return ord("z")

    assert constraint.look_ahead(10, nothing) == ([*b"le"], [True] * 2)
    assert constraint.look_ahead(1, nothing) == ([*b"l"], [True])
    draft, must = constraint.look_ahead(10, a_v)
    assert draft == [*b"lever", END]
    assert must == [True, True, False, True, True, True]
    assert constraint.look_ahead(10, a_z) == ([*b"le"], [True] * 2)
    for token in b"left":
        constraint.accept(token)
    assert constraint.look_ahead(10, nothing) == ([END], [True])
    constraint.accept(END)


def test_a_model_without_stop_tokens_cannot_be_constrained() -> None:
    compiler = GrammarCompiler(replace(VOCABULARY, stop_ids=frozenset()))
    with pytest.raises(GrammarError, match="no token that ends an output"):
        compiler.compile_now(grammar.json_object_grammar("x"))


async def test_a_grammar_that_makes_its_compiler_panic_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    def panic(*_: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(compiler_module, "_matcher", panic)
    compiler = GrammarCompiler(VOCABULARY)
    with pytest.raises(ApiError, match=r"'response_format'.*out of bounds") as refused:
        await compiler.compile(grammar.json_object_grammar("response_format"))
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    compiler.close()


class _SlowlyPrepared(GrammarCompiler):
    """Takes longer for its tokenizer than a grammar may take."""

    prepared = threading.Event()

    def _shared_tokenizer(self) -> LLTokenizer:
        self.prepared.wait(5)
        return super()._shared_tokenizer()


async def test_preparing_the_tokenizer_is_no_part_of_a_grammars_time() -> None:
    compiler = _SlowlyPrepared(VOCABULARY, timeout_s=0.5)
    asyncio.get_running_loop().call_later(0.6, compiler.prepared.set)
    assert await compiler.compile(grammar.json_object_grammar("response_format"))
    compiler.close()


async def test_a_slow_compilation_is_refused() -> None:
    impatient = GrammarCompiler(VOCABULARY, timeout_s=0.0)
    with pytest.raises(ApiError) as caught:
        await impatient.compile(grammar.json_object_grammar("response_format"))
    assert caught.value.retry_after_s or "does not compile" in caught.value.message
    impatient.close()
