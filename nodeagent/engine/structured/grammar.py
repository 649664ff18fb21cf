"""What an output must look like, as a grammar: from a JSON schema, a regex, a list of choices.

Rule 1: size and depth are refused here, before anything is compiled; what compiling and stepping
may cost is bounded in `constrain`.
Rule 2: a grammar is text in Lark's form. Whatever a client wrote stands in it as a quoted string or
as one JSON value, so that nobody can close a rule and write their own.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

SCHEMA_BYTES_MAX: Final = 64 * 1024
DEPTH_MAX: Final = 64
PROPERTIES_MAX: Final = 1000
MULTIPLES_MAX: Final = 20_000
"""Each multipleOf becomes an automaton of as many states as its digits say, noughts around left."""
REGEX_CHARS_MAX: Final = 4096
CHOICES_MAX: Final = 1024
CHOICES_BYTES_MAX: Final = 64 * 1024

# One blank, or a line break with its indentation. With more, small models write blanks until their
# tokens are spent: OpenAI warns of it in its JSON mode, vLLM has `disable_any_whitespace` against
# it. With none they write what they never read, and leave arrays empty.
_WHITESPACE: Final = r" |\r?\n( {0,32}|\t{0,8})"


class UnusableGrammar(ValueError):
    """What was asked for cannot be made a grammar; the message says why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar to compile, and the request's field that asked for it."""

    start: str
    param: str
    rules: tuple[str, ...] = ()

    @property
    def lark(self) -> str:
        """The grammar in Lark's form."""
        return "\n".join((f"start: {self.start}", *self.rules, ""))


def either(one: Grammar, other: Grammar) -> Grammar:
    """Return the grammar of what `one` or `other` allows; no rule may be in both."""
    return Grammar(f"{one.start} | {other.start}", one.param, one.rules + other.rules)


def of_schema(schema: Any, param: str, *, lenient: bool = False) -> Grammar:
    """Return the grammar of the JSON values that `schema` allows."""
    return Grammar(schema_rule(schema, param, lenient=lenient), param)


def of_any_object(param: str) -> Grammar:
    """Return the grammar of all JSON objects."""
    return of_schema({"type": "object"}, param)


def of_regex(pattern: str, param: str) -> Grammar:
    """Return the grammar of the texts that match `pattern` whole."""
    if not pattern or len(pattern) > REGEX_CHARS_MAX:
        raise UnusableGrammar(
            f"cannot use {param}: a regex has 1 to {REGEX_CHARS_MAX} characters, not {len(pattern)}"
        )
    return Grammar(f"/{_regex_literal(pattern)}/", param)


def of_choices(choices: list[str], param: str) -> Grammar:
    """Return the grammar of exactly these texts."""
    total_bytes = sum(len(choice.encode(errors="replace")) for choice in choices)
    if not choices or len(choices) > CHOICES_MAX or total_bytes > CHOICES_BYTES_MAX:
        raise UnusableGrammar(
            f"cannot use {param}: there are {len(choices)} choices of {total_bytes} bytes, allowed"
            f" are 1 to {CHOICES_MAX} of {CHOICES_BYTES_MAX} in all"
        )
    if not all(choices):
        raise UnusableGrammar(f"cannot use {param}: an empty choice is no answer")
    return Grammar(" | ".join(quoted(choice) for choice in choices), param)


def schema_rule(schema: Any, param: str, *, lenient: bool) -> str:
    """Return what stands in a rule for the JSON values that `schema` allows.

    `lenient` leaves out keywords that cannot be enforced; else they are an error when compiled.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UnusableGrammar(f"cannot use {param}: a JSON schema is an object")
    properties, multiples = _measure(schema, param)
    if properties > PROPERTIES_MAX:
        raise UnusableGrammar(
            f"cannot use {param}: the schema has {properties} properties, the limit is"
            f" {PROPERTIES_MAX}"
        )
    if multiples > MULTIPLES_MAX:
        raise UnusableGrammar(
            f"cannot use {param}: the digits of its multipleOf are {multiples:.0f} in all, the"
            f" limit is {MULTIPLES_MAX}"
        )
    options = {
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
        "lenient": lenient,
        "coerce_one_of": lenient,
    }
    # Last, so that a schema cannot bring options of its own.
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=True)
    if len(text) > SCHEMA_BYTES_MAX:
        raise UnusableGrammar(
            f"cannot use {param}: the schema takes {len(text)} bytes, the limit is"
            f" {SCHEMA_BYTES_MAX}"
        )
    return f"%json {text}"


def quoted(text: str) -> str:
    """Return `text` as a string of the grammar's language."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableGrammar("cannot constrain to a text that holds half a surrogate") from error
    # Lark's strings are JSON's; a raw line break would end the rule, so all but ASCII is escaped.
    return (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").replace("\x85", "\\u0085")
    )


def _regex_literal(pattern: str) -> str:
    """Escape what would end a /regex/ of the grammar's language."""
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
        raise UnusableGrammar("cannot use a regex that ends in a lone backslash")
    return "".join(literal)


def _measure(schema: dict[str, Any], param: str) -> tuple[int, float]:
    """Count properties and multiples, without recursion: how deep they lie is not known before."""
    properties, multiples = 0, 0.0
    layer: list[Any] = [schema]
    depth = 0
    while layer:
        depth += 1
        if depth > DEPTH_MAX:
            raise UnusableGrammar(
                f"cannot use {param}: the schema is nested more than {DEPTH_MAX} levels deep"
            )
        below: list[Any] = []
        for value in layer:
            if isinstance(value, dict):
                own = value.get("properties")
                properties += len(own) if isinstance(own, dict) else 0
                multiples += _digits(value.get("multipleOf"))
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        layer = below
    return properties, multiples


def _digits(number: Any) -> float:
    """Return a number's digits without the noughts around them, as a number."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    exact = Decimal(number if isinstance(number, int) else str(number)).normalize()
    return float(abs(exact.scaleb(-int(exact.as_tuple().exponent))))
