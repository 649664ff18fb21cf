"""What ARCHITECTURE and the other documents name is there, and every module is on the map."""

import re
from pathlib import Path

import pytest

from tests.unit.documents import anchors_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README", "ARCHITECTURE", "CONTRIBUTING", "STYLE", "migrations/README"),
    *(f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
FILES = [
    path.relative_to(ROOT)
    for folder in (
        "isochrone",
        "scheduler",
        "router",
        "nodeagent",
        "migrations",
        "ops",
        "tests",
        "docs",
    )
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
] + [path.relative_to(ROOT) for path in ROOT.iterdir() if path.is_file()]
NAMES = {str(path) for path in FILES} | {str(up) for path in FILES for up in path.parents}
MAPPED = [
    *("scheduler", "scheduler/decide", "scheduler/planner", "scheduler/loops"),
    *("router", "router/decide", "router/dataplane", "router/apis", "router/loops"),
    *("nodeagent", "nodeagent/decide", "nodeagent/host", "nodeagent/disaggregation"),
    "nodeagent/loops",
    *sorted(
        str(path.relative_to(ROOT))
        for package in ("router/decide", "nodeagent/decide", "nodeagent/host", "isochrone/wire")
        for path in (ROOT / package).iterdir()
        if (path / "__init__.py").is_file()
    ),
]
EVERYWHERE = {"__init__", "__main__", "app", "config", "metrics"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / f"{document}.md").read_text()
    quoted = re.findall(r"`([\w./-]*[\w-](?:\.(?:py|c|md|sh)|/))(?:: \w+)?`", text)
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = {name.rstrip("/") for name in (*quoted, *linked)}
    named = {name.removeprefix("../") for name in named}
    lost = {name for name in named if not any(f"/{there}".endswith(f"/{name}") for there in NAMES)}
    assert lost <= {"utils.py"}, "but the one that STYLE says there must not be"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_section_that_a_document_links_to_is_there(document: str) -> None:
    path = ROOT / f"{document}.md"
    lost = [
        f"{file}#{anchor}"
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
        if anchor not in anchors_of((path.parent / file if file else path).read_text())
    ]
    assert lost == []


MEASUREMENTS = sorted(path.relative_to(ROOT) for path in (ROOT / "ops").rglob("*.md"))


@pytest.mark.parametrize("document", MEASUREMENTS, ids=str)
def test_every_program_that_a_document_of_measurements_names_is_there(document: Path) -> None:
    text = (ROOT / document).read_text()
    modules = re.findall(r"python -m ((?:ops|tests)(?:\.[a-z]\w*)+)(?![.\w])", text)
    named = {
        *re.findall(r"`((?:\w+/)*\w+\.(?:py|c|h))`", text),
        *(f"{module.replace('.', '/')}.py" for module in modules),
    }
    there = NAMES | {name.replace("/__main__.py", ".py") for name in NAMES}
    assert not {name for name in named if not any(f"/{one}".endswith(f"/{name}") for one in there)}


def test_every_package_is_on_the_map() -> None:
    code_map = (ROOT / "ARCHITECTURE.md").read_text().split("## Code map")[1].split("```")[1]
    packages = {
        path.parent.name
        for service in ("isochrone", "scheduler", "router", "nodeagent")
        for path in (ROOT / service).rglob("*.py")
    }
    assert not packages - set(re.findall(r"\w+", code_map))


@pytest.mark.parametrize("package", MAPPED)
def test_every_module_is_on_the_map(package: str) -> None:
    code_map = (ROOT / "ARCHITECTURE.md").read_text().split("## Code map")[1].split("```")[1]
    named = set(re.findall(r"\w+", code_map)) | EVERYWHERE
    assert not {path.stem for path in (ROOT / package).glob("*.py")} - named
