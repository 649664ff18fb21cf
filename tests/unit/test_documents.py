"""The programs accept every configuration and command that the documents show."""

import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import click
import msgspec
import pytest

from isochrone.cli.main import main
from isochrone.service.config import load_config
from isochrone.wire.errors import MEANINGS, ErrorCode
from nodeagent.config import NodeConfig
from router.config import RouterConfig
from scheduler.api.admin.endpoint import not_found
from scheduler.config import SchedulerConfig
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.membership import LivenessLimits
from scheduler.decide.response_limits import ResponseLimits

ROOT = Path(__file__).parents[2]
DOCUMENTS = "\n".join(
    path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
)
SENTENCE_LENGTH_MIN = 60
"""Characters of a sentence that is not there twice on purpose, as a short label may be."""

KINDS: dict[str, type[msgspec.Struct]] = {
    "scheduler": SchedulerConfig,
    "node": NodeConfig,
    "router": RouterConfig,
}


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENTS, re.M | re.S)
    return [block for name, block in fenced if name == language]


def commands() -> list[str]:
    lines = "\n".join(blocks("")).splitlines()
    return sorted({line for line in lines if line.startswith("isochrone ")})


MESSAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "ops/prometheus").glob("*.yml"),
    *(
        path
        for service in ("isochrone", "scheduler", "router", "nodeagent")
        for path in (ROOT / service).rglob("*.py")
    ),
]
"""Files with texts that tell an operator what to type."""


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: str(path.name),
)
def test_no_document_says_a_sentence_twice(path: Path) -> None:
    """Merges of two changes of a paragraph have kept both."""
    text = re.sub(r"\s+", " ", path.read_text())
    sentences = Counter(
        part for part in re.split(r"(?<=[.:;]) ", text) if len(part) >= SENTENCE_LENGTH_MIN
    )
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def test_every_command_that_a_message_names_can_be_typed() -> None:
    named = {
        line
        for path in MESSAGES
        for line in re.findall(r"`isochrone ([a-z][^`\n]*)`", path.read_text())
    }
    assert len(named) > 40
    for line in sorted(named):
        can_be_typed(line)


OF_OTHER_PROGRAMS = {"--auth-type", "--ignore-missing", "--reasoning-parser"}


def options_of(command: click.Command) -> set[str]:
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    parts = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*(options_of(part) for part in parts))


def test_every_option_that_a_document_names_exists() -> None:
    named = set(re.findall(r"`(--[a-z][a-z-]*)", DOCUMENTS))
    assert len(named) > 30
    assert named - options_of(main) == OF_OTHER_PROGRAMS


LIMITS = (
    *(SchedulerConfig, NodeConfig, RouterConfig),
    *(LivenessLimits, BatchLimits, AdapterLimits, ResponseLimits),
)
UNITS = {
    **{"": 1.0, "s": 1.0, "minutes": 60.0, "hours": 3600.0, "a second": 1.0},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "megapixels": 1e6},
}
VALUE = r"(\d[\d,.]*) ?(" + "|".join(sorted(UNITS, key=len, reverse=True)) + ")"
STATED = (
    rf"`(?P<name>[a-z_]+)`(?:,| \()\s*{VALUE}[);]",
    rf"\b{VALUE}\b[^`().;|\d]{{0,40}}\(`(?P<name>[a-z_]+)`(?=[ )])",
)
"""A value behind the name of its setting, or before it."""


def test_a_document_states_the_default_of_a_setting() -> None:
    defaults = {
        field.name: field.default
        for limits in LIMITS
        for field in msgspec.structs.fields(limits)
        if isinstance(field.default, int | float)
    }
    text = re.sub(r"\s+", " ", DOCUMENTS)
    stated = [found for form in STATED for found in re.finditer(form, text)]
    known = [found for found in stated if found["name"] in defaults]
    assert len(known) > 15
    for found in known:
        number, unit = (part for part in found.groups() if part not in (None, found["name"]))
        value = float(number.replace(",", "")) * UNITS[unit]
        assert value == defaults[found["name"]], found[0]


def test_a_document_names_metrics_of_the_embedded_engine() -> None:
    named = set(re.findall(r"`isochrone_engine_([a-z_]+[a-z])[`{]", DOCUMENTS))
    sources = "\n".join(path.read_text() for path in (ROOT / "nodeagent" / "engine").rglob("*.py"))
    assert named
    assert [name for name in sorted(named) if f'"{name}"' not in sources] == []


def can_be_typed(line: str) -> None:
    command: click.Command = main
    words = line.split()
    while isinstance(command, click.Group) and (words or not command.invoke_without_command):
        found = command.get_command(click.Context(command), words.pop(0)) if words else None
        assert found is not None, f"isochrone {line}"
        command = found
    for flag in (word.partition("=")[0] for word in words if word.startswith("-")):
        assert any(flag in option.opts for option in command.params), f"isochrone {line}"


@pytest.mark.parametrize(
    "kind",
    [
        *("PoP", "node", "router", "model", "deployment", "key", "rollout", "adapter"),
        "budget of tenant",
    ],
)
def test_what_is_not_found_has_a_list(kind: str) -> None:
    (line,) = re.findall(r"`isochrone (.+?)`", not_found(kind, "x").message)
    can_be_typed(line)


def test_the_documents_show_a_configuration_of_every_service() -> None:
    assert sorted(re.findall(r"/etc/isochrone/(\w+)\.toml", DOCUMENTS)) == sorted(KINDS)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.split("\n")[0])
def test_a_configuration_in_the_documents_loads(block: str, tmp_path: Path) -> None:
    (kind,) = re.findall(r"^# (?:/etc/isochrone/)?(\w+)\.toml", block, re.M)
    whole = next(one for one in blocks("toml") if f"/etc/isochrone/{kind}.toml" in one)
    # Some blocks show a few settings of a file.
    (tmp_path / "c.toml").write_text(block if block == whole else f"{whole}{block}")
    config = load_config(KINDS[kind], tmp_path / "c.toml", {}, "NONE_")
    for name in tomllib.loads(block):
        assert getattr(config, name) != "", name


@pytest.mark.parametrize("line", commands())
def test_a_command_in_the_documents_parses(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "model.sig").touch()
    command: click.Command = main
    words = shlex.split(line, comments=True)[1:]
    for file in (word for word in words if word.endswith(".json")):
        (tmp_path / file).touch()
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, line
        command = found
    if words != ["--help"]:
        command.make_context("isochrone", words, resilient_parsing=False)


NOT_IN_THE_TABLE = {
    ErrorCode.INCOMPLETE_REQUEST,  # Workers AI's 3003: its answers have numbers instead of codes
    ErrorCode.PRECONDITION_FAILED,  # of the admin API
}


def test_the_table_of_errors_has_every_code_with_its_status() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d{3} ", line)]
    named = {
        (int(status), code) for row in rows for status, code in re.findall(r"(\d{3}) `(\w+)`", row)
    }
    assert named == {
        (meaning.status, code.value)
        for code, meaning in MEANINGS.items()
        if code not in NOT_IN_THE_TABLE
    }
    for row in rows:
        for code, number in re.findall(r"`(\w+)` \((\d+)\)", row):
            assert MEANINGS[ErrorCode(code)].number == int(number), row
