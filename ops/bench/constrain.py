"""Compares llguidance with xgrammar: the time to compile a schema, and to mask and accept a token.

    python -m ops.bench.constrain MODEL

xgrammar is not a dependency of this project; it is measured if it is installed. Each schema has a
document. Both libraries follow the tokens of the document, in alternating rounds.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.compiler import GrammarCompiler
from nodeagent.engine.structured.constraint import Constraint
from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import open_checkpoint

ROUNDS = 5


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = closed(
    {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
)
CELL = closed({"a": {"type": "string", "maxLength": 50}, "c": {"enum": ["red", "green"]}})
WIDE = closed({f"field_{n}": CELL for n in range(40)})
PATTERN = closed(
    {
        "email": {"type": "string", "pattern": r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,8}$"},
        "n": {"type": "integer", "minimum": 3, "maximum": 4000},
    }
)
DOCUMENTS: dict[str, tuple[Any, Any]] = {
    "person": (PERSON, {"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", 'a "quote"']}),
    "40 objects": (WIDE, {f"field_{n}": {"a": "some text", "c": "red"} for n in range(40)}),
    "pattern": (PATTERN, {"email": "ada@example.org", "n": 333}),
}


class GrammarMatcher(Protocol):
    """The state of one output in a compiled grammar."""

    def mask(self) -> None:
        """Compute the mask of allowed tokens and apply it."""

    def accept(self, token: int) -> None:
        """Take a token."""


class LlguidanceMatcher:
    """llguidance as the engine uses it; a mask is applied to logits."""

    def __init__(self, constraint: Constraint, logits: torch.Tensor) -> None:
        self._constraint, self._logits = constraint, logits
        self.accept = constraint.accept

    def mask(self) -> None:
        """Mask a row of logits."""
        self._constraint.apply(self._logits)


class XgrammarMatcher:
    """xgrammar; a mask is applied by its own kernel."""

    def __init__(self, xgrammar: Any, compiled: Any, logits: torch.Tensor) -> None:
        self._xgrammar, self._logits = xgrammar, logits[None]
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, logits.shape[0])

    def mask(self) -> None:
        """Mask a row of logits."""
        self._matcher.fill_next_token_bitmask(self._mask)
        self._xgrammar.apply_token_bitmask_inplace(self._logits, self._mask)

    def accept(self, token: int) -> None:
        """Take a token."""
        if not self._matcher.accept_token(token):
            raise ValueError(f"cannot accept token {token}")


@dataclass(slots=True)
class MatcherTimes:
    """The seconds that each operation took."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)

    def row(self) -> str:
        """Return the cells of a table's row."""
        high = sorted(self.mask)[int(0.99 * len(self.mask))]
        return (
            f"{median(self.compile) * 1e3:.1f} | {median(self.mask) * 1e6:.0f} |"
            f" {high * 1e6:.0f} | {median(self.accept) * 1e6:.1f}"
        )


def walk(build: Callable[[], GrammarMatcher], tokens: list[int], times: MatcherTimes) -> None:
    """Compile once, and follow one document."""
    started_s = time.perf_counter()
    matcher = build()
    times.compile.append(time.perf_counter() - started_s)
    for token in tokens:
        started_s = time.perf_counter()
        matcher.mask()
        masked_s = time.perf_counter()
        matcher.accept(token)
        times.accept.append(time.perf_counter() - masked_s)
        times.mask.append(masked_s - started_s)


def contestants(
    vocabulary: Vocabulary, schema: Any
) -> Iterator[tuple[str, Callable[[], GrammarMatcher]]]:
    """Yield the name of each library with a function that compiles `schema`."""
    compiler = GrammarCompiler(vocabulary)
    compiler.compile_now(grammar.json_object_grammar("warm"))
    logits = torch.zeros(vocabulary.size)
    wanted = grammar.json_schema_grammar(schema, "x")
    yield "llguidance", lambda: LlguidanceMatcher(compiler.compile_now(wanted), logits)
    if importlib.util.find_spec("xgrammar") is None:
        return
    xgrammar = importlib.import_module("xgrammar")
    info = xgrammar.TokenizerInfo(
        [vocabulary.tokenizer.id_to_token(token) for token in range(vocabulary.size)],
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=sorted(vocabulary.stop_ids),
    )
    xgrammar_compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    text = json.dumps(schema)
    yield (
        "xgrammar",
        lambda: XgrammarMatcher(xgrammar, xgrammar_compiler.compile_json_schema(text), logits),
    )


def main() -> None:
    """Print the table for the model at the path given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    source = open_checkpoint(arguments.model)
    vocabulary = read_vocabulary(source)
    source.close()
    print("| schema | library | compile ms | mask us | mask p99 us | accept us |")
    print("|---|---|---|---|---|---|")
    for name, (schema, document) in DOCUMENTS.items():
        tokens = vocabulary.encode(json.dumps(document), special=False)
        runs = [
            (library, build, MatcherTimes()) for library, build in contestants(vocabulary, schema)
        ]
        for _ in range(ROUNDS):
            for _, build, times in runs:
                walk(build, tokens, times)
        for library, _, times in runs:
            print(f"| {name} | {library} | {times.row()} |")


if __name__ == "__main__":
    main()
