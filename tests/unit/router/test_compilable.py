"""Check, without compiling, that the compiled modules avoid what mypyc compiles wrongly."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from isochrone import compiled

ROOT = Path(__file__).parent.parent.parent.parent


def hot() -> Iterator[Path]:
    for name in compiled.HOT:
        assert list(ROOT.glob(name)), f"isochrone/compiled.py: no {name} to compile"
    yield from (ROOT / name for name in compiled.hot_modules(ROOT))


def rel(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", list(hot()), ids=rel)
def test_a_compiled_module_holds_no_struct_and_no_foreign_base(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        bases = [ast.unparse(base) for base in getattr(node, "bases", ())]
        foreign = {"msgspec.Struct", "asyncio.Protocol", "asyncio.BufferedProtocol"}
        assert not foreign & set(bases), f"{rel(path)}:{ast.unparse(node)[:60]}"


@pytest.mark.parametrize("path", list(hot()), ids=rel)
def test_a_caught_error_of_a_compiled_coroutine_has_one_type(path: Path) -> None:
    # There a name is a field of one type: an error of another kind is refused by it.
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.AsyncFunctionDef):
            types: dict[str, str] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type:
                    kind = ast.unparse(node.type)
                    assert types.setdefault(node.name, kind) == kind, (
                        f"{rel(path)}:{node.lineno}: two kinds of error are named {node.name}"
                    )


@pytest.mark.parametrize("path", list(hot()), ids=rel)
def test_a_final_of_a_compiled_module_is_no_tuple_of_numbers(path: Path) -> None:
    # There it is held without a box, and some of its values read as if it were not set yet.
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            numbers = [ast.unparse(one) for one in node.value.elts if _is_number(one)]
            assert not numbers, f"{rel(path)}:{node.lineno}: {ast.unparse(node)[:60]}"


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
