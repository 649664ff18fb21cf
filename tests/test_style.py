"""Checks the rules of STYLE.md that a machine can check."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("isochrone", "scheduler", "router", "nodeagent", "migrations", "ops")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PURE_CONTRACT = "wire/ and every decide/ are pure"


def decision_modules() -> list[Path]:
    """Return the files of the packages that import-linter holds to be pure, but for wire/."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (c for c in contracts["contracts"] if c["name"] == PURE_CONTRACT)
    roots = {name.replace(".", "/") for name in pure["source_modules"]} - {"isochrone/wire"}
    names = {path: str(path.relative_to(ROOT).with_suffix("")) for path in FILES}
    return [p for p, name in names.items() if any(f"{name}/".startswith(f"{r}/") for r in roots)]


DECISIONS = decision_modules()
TESTS = sorted((ROOT / "tests").rglob("*.py"))

LINES_MAX = 450
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"util", "utils", "common", "helpers", "misc", "base", "manager"}

# Entries may be removed, and added only with a reason beside them.
LONG_FUNCTIONS_ALLOWED: set[str] = set()

# The files that may catch `Exception` and go on, and why. Everywhere else such a handler ends with
# a bare `raise`: it cleans up and passes the error on. Entries may be removed, and added only with
# a reason.
CATCH_ALL_ALLOWED = {
    "isochrone/service/loop.py": "the edge of a periodic job's turn: counted, logged, run again",
    "isochrone/service/threads.py": "the edge of a thread: its caller gets the error",
    "isochrone/service/network/http_server.py": "the edge of an aiohttp request: answered with 500",
    "router/apis/leased_work.py": "the edge of leased work: returned as a failed attempt",
    "router/dataplane/server.py": "the edge of a request of the router's own server: the same",
    "router/dataplane/inline_task.py": "the edge of a coroutine without a task",
    "router/documents/child.py": "the edge of a process: parsers of documents raise anything",
    "scheduler/planner/__main__.py": "the edge of a request to the planner: answered as a failure",
    "nodeagent/supervisor.py": "the edge of one replica's task: it fails alone and restarts",
    "nodeagent/engine/core/step_thread.py": "the edge of a thread: logged, then the engine ends",
    "nodeagent/engine/workers/worker_group.py": "the edge of a process: logged, it exits",
    "nodeagent/engine/tokenizer/hf_tokenizer.py": "the tokenizers package raises bare Exception",
    "nodeagent/engine/tokenizer/gguf_tokenizer.py": "the tokenizers package raises bare Exception",
    "ops/fuzz/checkpoints.py": "the fuzzer: any exception is a finding, which it records",
}


@cache
def read(path: Path) -> tuple[str, str, ast.Module]:
    """Return a file's name relative to the repository, its text and its syntax tree."""
    text = path.read_text()
    return str(path.relative_to(ROOT)), text, ast.parse(text)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_a_file_has_a_specific_name_and_is_not_too_long() -> None:
    wrong = [f"{path}: name it for what it does" for path in FILES if path.stem in BANNED_NAMES]
    for name, text, _ in map(read, FILES):
        if (lines := text.count("\n")) > LINES_MAX:
            wrong.append(f"{name} has {lines} lines, more than {LINES_MAX}")
    assert not wrong


def test_every_module_has_a_docstring() -> None:
    undocumented = [
        name
        for name, text, tree in map(read, FILES)
        if text.strip() and not ast.get_docstring(tree)
    ]
    assert not undocumented, "no module docstring"


def test_no_function_is_too_long() -> None:
    long = []
    for name, _, tree in map(read, FILES):
        for function in functions(tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if (
                length > FUNCTION_LINES_MAX
                and f"{name}:{function.name}" not in LONG_FUNCTIONS_ALLOWED
            ):
                long.append(f"{name}:{function.name} has {length} lines")
    assert not long


def test_decision_code_neither_awaits_nor_reads_a_clock() -> None:
    wrong = []
    for name, _, tree in map(read, DECISIONS):
        for node in ast.walk(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                wrong.append(f"{name}:{node.lineno} awaits")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"now", "utcnow", "monotonic", "time", "perf_counter"}
            ):
                wrong.append(f"{name}:{node.lineno} reads a clock: take the time as an argument")
    assert not wrong


def test_public_decision_code_has_docstrings() -> None:
    undocumented = [
        f"{name}:{node.name}"
        for name, _, tree in map(read, DECISIONS)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (node.name.startswith("_") or ast.get_docstring(node))
    ]
    assert not undocumented, "no docstring"


def test_no_code_is_unfinished_and_no_error_is_swallowed() -> None:
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    banner = re.compile(r"^[ \t]*#[ \t]*[-=#*]{3,}", re.M)
    swallowed = re.compile(r"^[ \t]*except\b[^:]*:\s*(#.*\s*)*pass$", re.M)
    wrong = []
    for path in FILES + TESTS:
        text = path.read_text()
        for rule in (unfinished, banner, swallowed):
            for found in rule.finditer(text):
                line = text.count("\n", 0, found.start()) + 1
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {found[0]!r}")
    assert not wrong


def catches_all(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches every exception: `except:`, Exception or BaseException."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
        for kind in kinds
    )


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler ends with a bare `raise`."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_no_exception_stands_before_an_or() -> None:
    """An exception without a message is true, too: `str(error) or ...` is meant."""
    wrong = [
        f"{name}:{choice.lineno}"
        for name, _, tree in map(read, FILES)
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler)
        for choice in ast.walk(handler)
        if isinstance(choice, ast.BoolOp) and isinstance(choice.op, ast.Or)
        if any(isinstance(v, ast.Name) and v.id == handler.name for v in choice.values[:-1])
    ]
    assert not wrong


def test_only_edges_catch_every_exception() -> None:
    catching = {
        name
        for name, _, tree in map(read, FILES)
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and catches_all(node) and not passes_on(node)
    }
    unknown = catching - set(CATCH_ALL_ALLOWED)
    assert not unknown, "catch narrower exceptions, or re-raise after cleaning up"
    unused = set(CATCH_ALL_ALLOWED) - catching
    assert not unused, "remove these files from CATCH_ALL_ALLOWED"


def test_class_names_are_unique() -> None:
    files_of: dict[str, list[str]] = {}
    for name, _, tree in map(read, FILES):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, []).append(name)
    repeated = {name: files for name, files in files_of.items() if len(files) > 1}
    assert not repeated, "give each class a specific name of its own"


def test_unit_tests_do_not_sleep() -> None:
    units = [path for path in TESTS if "unit" in path.parts]
    assert not [path for path in units if re.search(r"\bsleep\(", path.read_text())]


def test_migrations_are_numbered_without_gaps() -> None:
    numbers = [int(p.name[:4]) for p in sorted((ROOT / "migrations").glob("[0-9]*.sql"))]
    assert numbers == list(range(1, len(numbers) + 1))
