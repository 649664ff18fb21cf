"""Grammars of constrained outputs, from JSON schemas, regular expressions and lists of choices.

Rule 1: the size and depth of the input are checked here, before anything is compiled. The cost of
compiling and of each step is bounded in `compiler`.
Rule 2: a grammar is text in Lark syntax. A client's text appears in it only as a quoted string or
as one JSON value, so that a client cannot end a rule and write its own.
"""

import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from isochrone.wire.engines.schema_numbers import NUMBER_MIN, has_low_number

SCHEMA_BYTES_MAX: Final = 64 * 1024
DEPTH_MAX: Final = 64
"""Levels of nesting in a JSON schema."""
PROPERTIES_MAX: Final = 1000
PATTERN_PROPERTIES_MAX: Final = 100
"""The compiler checks that no two of them match the same name: a hundred take half a second."""
MULTIPLES_MAX: Final = 20_000
"""The sum of all `multipleOf` values of a schema, each as an integer without trailing zeros. Each
becomes an automaton with that many states. Values that one number must satisfy become one automaton
with as many states as their least common multiple."""
JOINED_PATTERNS_MAX: Final = 10
"""How many different patterns one string may have to match. The compiler's time and memory double
with each of them, which none of its own limits stops: 18 take 2 s and 55 MB, 22 over 40 s."""
REGEX_CHARS_MAX: Final = 4096
CHOICES_MAX: Final = 1024
CHOICES_BYTES_MAX: Final = 64 * 1024

# At most one space, or one line break with its indentation. If more is allowed, small models write
# white space until max_tokens: OpenAI's JSON mode documents this, and vLLM offers
# `disable_any_whitespace`. If none is allowed, the output differs from all training data, and
# models leave arrays empty.
_WHITESPACE: Final = r" |\r?\n( {0,32}|\t{0,8})"


class GrammarError(ValueError):
    """A grammar cannot be built from this input; the error text says why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar to compile, and the request field that it comes from."""

    start: str
    """The right side of the start rule."""
    param: str
    rules: tuple[str, ...] = ()

    @property
    def lark(self) -> str:
        """The grammar in Lark syntax."""
        return "\n".join((f"start: {self.start}", *self.rules, ""))


def union(first: Grammar, second: Grammar) -> Grammar:
    """Return the grammar of the texts of either grammar. Their rules must have different names."""
    return Grammar(f"{first.start} | {second.start}", first.param, first.rules + second.rules)


def json_schema_grammar(schema: Any, param: str, *, lenient: bool = False) -> Grammar:
    """Return the grammar of the JSON values that `schema` allows; see `schema_rule`."""
    return Grammar(schema_rule(schema, param, lenient=lenient), param)


def json_object_grammar(param: str) -> Grammar:
    """Return the grammar of all JSON objects."""
    return json_schema_grammar({"type": "object"}, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Return the grammar of the texts that match `pattern` from start to end."""
    if not pattern or len(pattern) > REGEX_CHARS_MAX:
        raise GrammarError(
            f"cannot use field '{param}': expected a regex of 1 to {REGEX_CHARS_MAX} characters,"
            f" got {len(pattern)}"
        )
    return Grammar(f"/{_regex_literal(pattern, param)}/", param)


def choice_grammar(choices: list[str], param: str) -> Grammar:
    """Return the grammar of exactly these texts."""
    total_bytes = sum(len(choice.encode(errors="replace")) for choice in choices)
    if not choices or len(choices) > CHOICES_MAX or total_bytes > CHOICES_BYTES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': expected 1 to {CHOICES_MAX} choices of at most"
            f" {CHOICES_BYTES_MAX} bytes together, got {len(choices)} of {total_bytes} bytes"
        )
    if not all(choices):
        raise GrammarError(f"cannot use field '{param}': a choice must not be empty")
    return Grammar(" | ".join(quote(choice) for choice in choices), param)


def schema_rule(schema: Any, param: str, *, lenient: bool) -> str:
    """Return the term of a grammar rule for the JSON values that `schema` allows.

    `lenient` ignores keywords that cannot be enforced; otherwise they are an error of the compiler.
    Raises GrammarError.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"cannot use field '{param}': a JSON schema must be an object")
    size = _measure(schema, param)
    if size.properties > PROPERTIES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': the schema has {size.properties} properties, the limit is"
            f" {PROPERTIES_MAX}"
        )
    if size.pattern_properties > PATTERN_PROPERTIES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': the schema has {size.pattern_properties} entries in"
            f" 'patternProperties', the limit is {PATTERN_PROPERTIES_MAX}"
        )
    _check_joins(size, param)
    if size.multiples > MULTIPLES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': the multipleOf values without their zeros add up to"
            f" {size.multiples:.0f}, the limit is {MULTIPLES_MAX}"
        )
    options = {
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
        "lenient": lenient,
        "coerce_one_of": lenient,
    }
    # The options come last, so that a schema cannot override them.
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=True)
    if len(text) > SCHEMA_BYTES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': the schema takes {len(text)} bytes, the limit is"
            f" {SCHEMA_BYTES_MAX}"
        )
    return f"%json {text}"


def quote(text: str) -> str:
    """Return `text` as a string literal in Lark syntax."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("cannot constrain the output to a text with a lone surrogate") from error
    # Lark strings are JSON strings. JSON leaves DEL and NEL as they are; a line break ends a rule.
    return (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").replace("\x85", "\\u0085")
    )


def _regex_literal(pattern: str, param: str) -> str:
    """Escape the slashes and line breaks of `pattern`, which would end a regex literal."""
    literal: list[str] = []
    escaped = False
    for letter in pattern:
        if letter == "/" and not escaped:
            literal.append("\\/")
        elif letter == "\n":
            literal.append("n" if escaped else "\\n")
        else:
            literal.append(letter)
        escaped = letter == "\\" and not escaped
    if escaped:
        raise GrammarError(f"cannot use field '{param}': the regex ends in a lone backslash")
    return "".join(literal)


@dataclass(slots=True)
class _SchemaSize:
    """The parts of a schema that cost memory when it is compiled."""

    properties: int = 0
    pattern_properties: int = 0
    multiples: float = 0.0
    different_multiples: set[int] = field(default_factory=set)
    joins: int = 0
    """How often a value must satisfy one more schema than one. Schemas that are referred to count
    once: a reference adds no pattern that is not there. So no value must satisfy more than
    `joins` + 1 of the schema's patterns."""
    patterns: set[str] = field(default_factory=set)
    """Those of `pattern` and `format`."""


def _measure(schema: dict[str, Any], param: str) -> _SchemaSize:
    """Measure a schema level by level, without recursion: its depth is not known yet."""
    size = _SchemaSize()
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise GrammarError(
                f"cannot use field '{param}': the schema is nested more than {DEPTH_MAX} levels"
                " deep"
            )
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                size.properties += _entries(value.get("properties"))
                size.pattern_properties += _entries(value.get("patternProperties"))
                multiple = _without_zeros(value.get("multipleOf"))
                size.multiples += multiple
                if 0 < multiple <= MULTIPLES_MAX:
                    size.different_multiples.add(int(multiple))
                size.joins += _joins(value)
                for key in ("pattern", "format"):
                    if isinstance(value.get(key), str):
                        size.patterns.add(value[key])
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        level = below
    if has_low_number(schema):
        raise GrammarError(
            f"cannot use field '{param}': the schema has a number below {NUMBER_MIN}"
        )
    return size


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _check_joins(size: _SchemaSize, param: str) -> None:
    """Raise GrammarError if one value may have to satisfy too much at once."""
    if size.joins and math.lcm(*size.different_multiples) > MULTIPLES_MAX:
        raise GrammarError(
            f"cannot use field '{param}': the least common multiple of the multipleOf values"
            f" without their zeros is over {MULTIPLES_MAX}, the limit of a schema with 'allOf' or"
            " with keywords beside '$ref'"
        )
    joined = min(size.joins + 1, len(size.patterns))
    if joined > JOINED_PATTERNS_MAX:
        raise GrammarError(
            f"cannot use field '{param}': a string may have to match {joined} different patterns"
            f" and formats ('allOf', or keywords beside '$ref'), the limit is {JOINED_PATTERNS_MAX}"
        )


def _joins(schema: dict[str, Any]) -> int:
    """Return how many more schemas than one a value of `schema` must satisfy by itself."""
    all_of = schema.get("allOf")
    parts = len(all_of) if isinstance(all_of, list) else 0
    parts += sum(key in schema for key in ("$ref", "$dynamicRef", "anyOf", "oneOf"))
    parts += any(key in schema for key in ("pattern", "format", "multipleOf"))
    return max(0, parts - 1)


def _without_zeros(number: Any) -> float:
    """Return the significant digits of a number as an integer; 0 for anything else.

    0.05, 5 and 500 all give 5.
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    exact = Decimal(number if isinstance(number, int) else str(number)).normalize()
    return float(abs(exact.scaleb(-int(exact.as_tuple().exponent))))
