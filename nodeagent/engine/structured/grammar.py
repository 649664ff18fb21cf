"""Grammars of constrained outputs, from JSON schemas, regular expressions and lists of choices.

Rule 1: the size and depth of the input are checked here, before anything is compiled. The cost of
compiling and of each step is bounded in `compiler`.
Rule 2: a grammar is text in Lark syntax. A client's text appears in it only as a quoted string or
as one JSON value, so that a client cannot end a rule and write its own.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from isochrone.wire.engines.schema_numbers import NUMBER_MIN, has_low_number

SCHEMA_BYTES_MAX: Final = 64 * 1024
DEPTH_MAX: Final = 64
"""Levels of nesting in a JSON schema."""
PROPERTIES_MAX: Final = 1000
MULTIPLES_MAX: Final = 20_000
"""The sum of all `multipleOf` values of a schema, each as an integer without trailing zeros. Each
becomes an automaton with that many states."""
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
    multiples: float = 0.0


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
                properties = value.get("properties")
                size.properties += len(properties) if isinstance(properties, dict) else 0
                size.multiples += _without_zeros(value.get("multipleOf"))
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        level = below
    if has_low_number(schema):
        raise GrammarError(
            f"cannot use field '{param}': the schema has a number below {NUMBER_MIN}"
        )
    return size


def _without_zeros(number: Any) -> float:
    """Return the significant digits of a number as an integer; 0 for anything else.

    0.05, 5 and 500 all give 5.
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    exact = Decimal(number if isinstance(number, int) else str(number)).normalize()
    return float(abs(exact.scaleb(-int(exact.as_tuple().exponent))))
