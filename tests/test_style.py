"""The style, executed: what STYLE.md asks for and a machine can see is held here."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("isochrone", "scheduler", "router", "nodeagent", "migrations", "ops")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DECISIONS = [path for path in FILES if "decide" in path.parts]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

LINES_MAX = 450
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"util", "utils", "common", "helpers", "misc", "base", "manager"}

# A ratchet: entries may be removed, never added without a reason beside them.
LONG_FUNCTIONS_ALLOWED: set[str] = set()


@cache
def read(path: Path) -> tuple[str, str, ast.Module]:
    """A file's name, its text and what it says."""
    text = path.read_text()
    return str(path.relative_to(ROOT)), text, ast.parse(text)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_a_file_is_named_for_its_room_and_fits_in_it() -> None:
    wrong = [f"{path}: name it for what it does" for path in FILES if path.stem in BANNED_NAMES]
    for name, text, _ in map(read, FILES):
        if (lines := text.count("\n")) > LINES_MAX:
            wrong.append(f"{name} has {lines} lines, more than {LINES_MAX}")
    assert not wrong


def test_a_file_says_at_the_top_what_it_is() -> None:
    silent = [
        name
        for name, text, tree in map(read, FILES)
        if text.strip() and not ast.get_docstring(tree)
    ]
    assert not silent, "no docstring"


def test_a_function_fits_on_a_screen() -> None:
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


def test_a_decision_awaits_nothing_and_asks_no_clock() -> None:
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
                wrong.append(f"{name}:{node.lineno} asks a clock: take the time as an argument")
    assert not wrong


def test_a_decision_says_what_it_answers() -> None:
    silent = [
        f"{name}:{node.name}"
        for name, _, tree in map(read, DECISIONS)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (node.name.startswith("_") or ast.get_docstring(node))
    ]
    assert not silent, "no docstring"


def test_nothing_is_left_unfinished_or_swallowed() -> None:
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


def test_a_unit_test_never_sleeps() -> None:
    units = [path for path in TESTS if "unit" in path.parts]
    assert not [path for path in units if re.search(r"\bsleep\(", path.read_text())]


def test_migrations_are_numbered_without_gaps() -> None:
    numbers = [int(p.name[:4]) for p in sorted((ROOT / "migrations").glob("[0-9]*.sql"))]
    assert numbers == list(range(1, len(numbers) + 1))
