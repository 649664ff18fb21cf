"""llguidance beside xgrammar: time to compile a schema, and to mask and accept each token.

    python -m ops.bench.constrain MODEL

xgrammar is no dependency; it is measured where it is installed. Each schema has a document, and
both walk through the document's own tokens, turn by turn, so that they answer the same questions.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.compiler import Grammars
from nodeagent.engine.structured.constraint import Constraint
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import open_checkpoint

ROUNDS = 5


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema that allows these properties, all of them and no other."""
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


class Matcher(Protocol):
    """One grammar in motion."""

    def mask(self) -> None:
        """Compute which tokens may come."""

    def accept(self, token: int) -> None:
        """Take a token."""


class Ours:
    """llguidance as the engine drives it, the mask applied to logits included."""

    def __init__(self, constraint: Constraint, logits: torch.Tensor) -> None:
        self._constraint, self._logits = constraint, logits
        self.accept = constraint.accept

    def mask(self) -> None:
        """Mask a row of logits."""
        self._constraint.apply(self._logits)


class Theirs:
    """xgrammar, its mask applied by its own kernel."""

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
class Times:
    """Seconds of each kind of work."""

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


def walk(build: Callable[[], Matcher], tokens: list[int], times: Times) -> None:
    """Compile once and follow one document."""
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


def contestants(vocabulary: Vocabulary, schema: Any) -> Iterator[tuple[str, Callable[[], Matcher]]]:
    """Yield each library's name with what compiles `schema`."""
    grammars = Grammars(vocabulary)
    grammars.build(grammar.of_any_object("warm"))
    logits = torch.zeros(vocabulary.size)
    yield "llguidance", lambda: Ours(grammars.build(grammar.of_schema(schema, "x")), logits)
    if importlib.util.find_spec("xgrammar") is None:
        return
    xgrammar = importlib.import_module("xgrammar")
    info = xgrammar.TokenizerInfo(
        [vocabulary.tokenizer.id_to_token(token) for token in range(vocabulary.size)],
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=sorted(vocabulary.stop_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    text = json.dumps(schema)
    yield "xgrammar", lambda: Theirs(xgrammar, compiler.compile_json_schema(text), logits)


def main() -> None:
    """Print the table for the model at the path given."""
    torch.set_num_threads(2)
    source = open_checkpoint(Path(sys.argv[1]))
    vocabulary = source.vocabulary()
    source.close()
    print("| schema | library | compile ms | mask us | mask p99 us | accept us |")
    print("|---|---|---|---|---|---|")
    for name, (schema, document) in DOCUMENTS.items():
        tokens = vocabulary.encode(json.dumps(document), special=False)
        runs = [(library, build, Times()) for library, build in contestants(vocabulary, schema)]
        for _ in range(ROUNDS):
            for _, build, times in runs:
                walk(build, tokens, times)
        for library, _, times in runs:
            print(f"| {name} | {library} | {times.row()} |")


if __name__ == "__main__":
    main()
