"""Fuzzes the compiler of grammars: a schema or pattern compiles, or is refused in words.

`python -m ops.fuzz.grammars SECONDS [SEED]`. The compiler is native code, so a case may end the
process: cases run in a child, and the one that ended it is printed. So is one that raises anything
but a refusal. The exit status is 1 after any finding.
"""

import mmap
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from nodeagent.engine.structured.compiler import GrammarCompiler
from nodeagent.engine.structured.constraint import Constraint, ConstraintError
from nodeagent.engine.structured.grammar import (
    GrammarError,
    json_schema_grammar,
    regex_grammar,
)
from tests.unit.engine.byte_vocabulary import VOCABULARY

CASES_PER_CHILD: Final = 500
TOKENS_MAX: Final = 40
DEPTH_MAX: Final = 4

EDGES: Final = (0, 1, 10, 2**31, 2**32, 2**53, 2**63, 2**64, 10**18, 10**19, 10**400)
FLOATS: Final = (1e308, -1e308, 5e-324, 1e-300, 0.1, -0.0, 1.5, 123456789.123456, 1e15)
TYPES: Final = ("string", "number", "integer", "object", "array", "boolean", "null")
TEXTS: Final = (
    "", "a", "\0", "\ud83d", "é" * 50, "#", "#/", "#/$defs/a", "#/properties/a", "~1~0", "http://x",
    "date-time", "ipv4", "uuid", "regex", "email", "x" * 5000, "\u2028", "/", "\r", "[", "\\",
    "(a|b){1,99999}", "^$", "(?=a)", "(?i)a", "\\p{L}+", "(a*)*b", "[^\\x00-\\x7f]{3,2}", "a{,5}",
    ".{0,100000}", "(?<n>a)\\k<n>", "\\b\\B", "[[:alpha:]]", "\\d{1000000000}", "(?:)",
)  # fmt: skip
ATOMS: Final = (
    "a", ".", "\\d", "\\w", "\\s", "[a-z]", "[^a]", "(a|b)", "(?i:a)", "\\p{Greek}", "\\u{1F600}",
    "\\x41", "\\n", "/", "\n", "\r", "^", "$", "\\b", "(?=a)", "(?!a)", "\\1", "[", "]", "(", ")",
    "{", "}", "*", "+", "?", "{3}", "{1,}", "{1000}", "{0,99999}", "|", "é", "😀", "\\", "&", "~",
    "\0", "&&", "[a&&b]", "\\p{L}", "(?P<x>a)", "(?s).", "(?x) a", "\\Q", "\\E", "%", '"', "'",
)  # fmt: skip
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS: Final = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then")
LIMITS: Final = (
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
STRINGS: Final = ("pattern", "format", "$ref", "$id", "$schema", "$anchor", "title")
VALUES: Final = ("const", "enum", "required", "default", "x-guidance", "nullable", "uniqueItems")
KEYWORDS: Final = ("type", *MAPS, *LISTS, *SCHEMAS, *LIMITS, *STRINGS, *VALUES)


class Case(NamedTuple):
    """A schema or a pattern, and whether keywords that cannot be enforced are ignored."""

    schema: Any
    pattern: str
    is_lenient: bool


def case_of(seed: int, number: int) -> Case:
    """Return one case, always the same."""
    chance = random.Random(f"{seed} {number}")
    if chance.random() < 0.4:
        return Case(None, "".join(chance.choices(ATOMS, k=chance.randint(1, 13))), is_lenient=False)
    return Case(_schema(chance, DEPTH_MAX), "", chance.random() < 0.5)


def _number(chance: random.Random) -> float:
    if chance.random() < 0.3:
        return chance.choice(FLOATS)
    edge = chance.choice((1, -1)) * chance.choice(EDGES)
    near = edge + chance.choice((0, 0, 1, -1, 3, -3, chance.randint(-1000, 1000)))
    return float(near) if chance.random() < 0.1 and abs(near) < 10**300 else near


def _value(chance: random.Random, depth: int) -> Any:
    if depth <= 0 or chance.random() < 0.6:
        return chance.choice((_number(chance), chance.choice(TEXTS), True, False, None))
    if chance.random() < 0.6:
        return [_value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return _schema(chance, depth - 1)


def _schema(chance: random.Random, depth: int) -> Any:
    if depth <= 0:
        return chance.choice(({}, True, False, {"type": chance.choice(TYPES)}))

    def below() -> Any:
        return _schema(chance, depth - 1)

    kinds: dict[tuple[str, ...], Callable[[], Any]] = {
        ("type",): lambda: chance.choice((chance.choice(TYPES), list(chance.sample(TYPES, 2)))),
        MAPS: lambda: {chance.choice(TEXTS): below() for _ in range(chance.randint(0, 2))},
        LISTS: lambda: [below() for _ in range(chance.randint(0, 3))],
        SCHEMAS: below,
        LIMITS: lambda: _number(chance),
        STRINGS: lambda: chance.choice(TEXTS),
        VALUES: lambda: _value(chance, depth - 1),
    }
    schema = {}
    for keyword in chance.choices(KEYWORDS, k=chance.randint(1, 4)):
        make = next(make for names, make in kinds.items() if keyword in names)
        schema[keyword] = make() if chance.random() < 0.95 else _value(chance, depth - 1)
    return schema


def run_case(compiler: GrammarCompiler, case: Case, seed: int) -> str:
    """Compile a case and write some tokens with it; return what became of it."""
    try:
        if case.pattern:
            grammar = regex_grammar(case.pattern, "p")
        else:
            grammar = json_schema_grammar(case.schema, "p", lenient=case.is_lenient)
        _write(compiler.compile_now(grammar), seed)
    except GrammarError:
        return "refused"
    except ConstraintError:
        return "ended"
    return "written"


def _write(constraint: Constraint, seed: int) -> None:
    chance, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(TOKENS_MAX):
        logits = torch.randn(VOCABULARY.size, generator=noise)
        # Ends and closing marks are likely, so that some outputs come to an end.
        logits[[*VOCABULARY.stop_ids, *b'"}],:']] += 3
        constraint.apply(logits)
        for position in (constraint, constraint.copy()):
            position.look_ahead(3, lambda _: chance.choice((None, chance.randrange(256))))
        token = int(logits.argmax())
        constraint.accept(token)
        if token in VOCABULARY.stop_ids:
            return


def run_child(seed: int, first: int, reached: mmap.mmap) -> bool:
    """Run cases in a child, which notes how far it came; return whether all of them ended well."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    torch.set_num_threads(1)
    status, compiler = 1, GrammarCompiler(VOCABULARY)
    try:
        for number in range(first, first + CASES_PER_CHILD):
            reached[:8] = number.to_bytes(8, "little")
            run_case(compiler, case_of(seed, number), number)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        # The parent's buffers must not be written twice.
        os._exit(status)


def main() -> int:
    """Fuzz for a while; print the findings and how many cases were run."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    reached, number, found = mmap.mmap(-1, 8), 0, 0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if run_child(seed, number, reached):
            number += CASES_PER_CHILD
            continue
        found += 1
        number = int.from_bytes(reached[:8], "little")
        sys.stdout.write(f"found, seed {seed}, case {number}: {case_of(seed, number)!r}\n")
        number += 1
    sys.stdout.write(f"{number} grammars, {found} found, seed {seed}\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
