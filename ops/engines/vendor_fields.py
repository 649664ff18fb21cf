"""Read the fields of SGLang's and TensorRT-LLM's servers from a checkout of their source.

    python -m ops.engines.vendor_fields sglang PATH [--check]

Replaces the `generated` part of one engine in tests/engines/vendor_fields.json, from which the
server of tests/engines/vendor_server.py is made; with `--check` it says what differs. PATH is the
folder that has the package (`sglang`, `tensorrt_llm`). Nothing of it is imported or run.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ops.engines.vllm_cpu import ROOT

DATA: Final = ROOT / "tests" / "engines" / "vendor_fields.json"
PROTOCOL: Final[Mapping[str, str]] = {
    "sglang": "sglang/srt/entrypoints/openai/protocol.py",
    "tensorrt_llm": "tensorrt_llm/serve/openai_protocol.py",
}
METRICS: Final[Mapping[str, str]] = {
    "sglang": "sglang/srt/observability/metrics_collector.py",
    "tensorrt_llm": "tensorrt_llm/metrics/collector.py",
}
PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "sglang": {"tool": "Tool", "function": "Function"},
    "tensorrt_llm": {
        "tool": "ChatCompletionToolsParam",
        "function": "FunctionDefinition",
        "disaggregated_params": "DisaggregatedParams",
    },
}
REQUESTS: Final[Mapping[str, str]] = {
    "chat": "ChatCompletionRequest",
    "completion": "CompletionRequest",
    "stream_options": "StreamOptions",
}
ANSWERS: Final[Mapping[str, str]] = {
    "chat": "ChatCompletionResponse",
    "chat_choice": "ChatCompletionResponseChoice",
    "message": "ChatMessage",
    "chat_event": "ChatCompletionStreamResponse",
    "chat_event_choice": "ChatCompletionResponseStreamChoice",
    "delta": "DeltaMessage",
    "completion": "CompletionResponse",
    "completion_choice": "CompletionResponseChoice",
    "completion_event": "CompletionStreamResponse",
    "completion_event_choice": "CompletionResponseStreamChoice",
    "usage": "UsageInfo",
    "error": "ErrorResponse",
}
"""The classes of the protocol by what they describe."""

SIMPLE: Final[Mapping[str, str]] = {
    **{name: name for name in ("int", "float", "bool", "str")},
    **dict.fromkeys(("Dict", "dict", "object"), "dict"),
    **dict.fromkeys(("List", "list"), "list"),
}


class Protocol:
    """The classes of a module of pydantic models."""

    def __init__(self, text: str) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._aliases[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._aliases[ast.unparse(node.target)] = node.value

    def fields(self, name: str) -> dict[str, str]:
        """Return the types of a class's fields, those of its bases first, in their order."""
        node = self._classes.get(name)
        found: dict[str, str] = {}
        if node is None:
            return found
        for base in node.bases:
            found |= self.fields(ast.unparse(base))
        for line in node.body:
            field = ast.unparse(line.target) if isinstance(line, ast.AnnAssign) else "_"
            if isinstance(line, ast.AnnAssign) and not field.startswith("_"):
                found[field] = "|".join(sorted(self._kinds(line.annotation)))
        return found

    def required(self, name: str) -> list[str]:
        """Return the fields of a class without a default."""
        node = self._classes[name]
        inherited = [self.required(ast.unparse(base)) for base in self._bases(node)]
        return [field for fields in inherited for field in fields] + [
            ast.unparse(line.target)
            for line in node.body
            if isinstance(line, ast.AnnAssign) and line.value is None
        ]

    def aliases(self, name: str) -> dict[str, str]:
        """Return the second names under which a class takes its fields."""
        found = {}
        for line in self._classes[name].body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                for keyword in line.value.keywords:
                    is_text = isinstance(keyword.value, ast.Constant)
                    if keyword.arg == "validation_alias" and is_text:
                        found[ast.unparse(line.target)] = str(ast.literal_eval(keyword.value))
        return found

    def forbids_others(self, name: str) -> bool:
        """Return whether a class refuses fields that it does not have."""
        node = self._classes[name]
        own = any("extra='forbid'" in ast.unparse(line) for line in node.body)
        return own or any(self.forbids_others(ast.unparse(base)) for base in self._bases(node))

    def _bases(self, node: ast.ClassDef) -> list[ast.expr]:
        return [base for base in node.bases if ast.unparse(base) in self._classes]

    def _kinds(self, annotation: ast.expr) -> set[str]:
        """Return the kinds of JSON values that an annotation allows: `any` if it does not say."""
        if isinstance(annotation, ast.BinOp):
            return self._kinds(annotation.left) | self._kinds(annotation.right)
        if isinstance(annotation, ast.Constant):
            return {"null"} if annotation.value is None else {"any"}
        if isinstance(annotation, ast.Subscript):
            outer, inner = ast.unparse(annotation.value), annotation.slice
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer == "Literal":
                return {type(ast.literal_eval(part)).__name__ for part in parts}
            if outer == "Annotated":
                return self._kinds(parts[0])
            if outer in ("Optional", "Union"):
                kinds = set().union(*(self._kinds(part) for part in parts))
                return kinds | ({"null"} if outer == "Optional" else set())
            return {SIMPLE.get(outer, "any")}
        name = ast.unparse(annotation)
        if name in self._aliases:
            return self._kinds(self._aliases[name])
        return {"dict" if name in self._classes else SIMPLE.get(name, "any")}


def read(engine: str, folder: Path, metrics: Mapping[str, str]) -> dict[str, Any]:
    """Return the generated part of an engine's description.

    `metrics` are the metrics that the agent reads. Those that the source lacks are left out.
    """
    protocol = Protocol((folder / PROTOCOL[engine]).read_text())
    requests = {**REQUESTS, **PARTS[engine]}
    text = (folder / METRICS[engine]).read_text()
    prefix = next(iter(re.findall(r'metric_prefix = "(\w+)"', text)), "")
    return {
        "forbids_other_fields": protocol.forbids_others("ChatCompletionRequest"),
        "request": {key: protocol.fields(name) for key, name in requests.items()},
        "required": {key: protocol.required(name) for key, name in requests.items()},
        "second_names": protocol.aliases("ChatCompletionRequest"),
        "answer": {key: list(protocol.fields(name)) for key, name in ANSWERS.items()},
        "metrics": {
            key: name for key, name in metrics.items() if f'"{name.removeprefix(prefix)}"' in text
        },
    }


def main() -> None:
    """Write or check one engine's part of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(PROTOCOL))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    data = json.loads(DATA.read_text())
    entry = data[arguments.engine]
    found = read(arguments.engine, arguments.folder, entry["metrics_read"])
    differing = [name for name in found if found[name] != entry.get("generated", {}).get(name)]
    if arguments.check:
        for name in differing:
            sys.stdout.write(f"{name}: {json.dumps(found[name])}\n")
        sys.exit(bool(differing))
    entry["generated"] = found
    DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
