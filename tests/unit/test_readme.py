"""What README shows is what the programs take: its configurations, and each command it types."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

from isochrone.cli.main import main
from isochrone.service.config import load_config
from nodeagent.config import NodeConfig
from router.config import RouterConfig
from scheduler.config import SchedulerConfig

README = (Path(__file__).parents[2] / "README.md").read_text()
KINDS: dict[str, type[msgspec.Struct]] = {
    "scheduler": SchedulerConfig,
    "node": NodeConfig,
    "router": RouterConfig,
}


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    return [block for name, block in fenced if name == language]


def commands() -> list[str]:
    lines = "\n".join(blocks("")).splitlines()
    return [line for line in lines if line.startswith("isochrone ")]


def test_every_service_has_a_configuration() -> None:
    assert sorted(re.findall(r"/etc/isochrone/(\w+)\.toml", README)) == sorted(KINDS)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.split("\n")[0])
def test_a_configuration_is_taken_as_it_stands(block: str, tmp_path: Path) -> None:
    (kind,) = re.findall(r"/etc/isochrone/(\w+)\.toml", block)
    (tmp_path / "c.toml").write_text(block)
    config = load_config(KINDS[kind], tmp_path / "c.toml", {}, "NONE_")
    for name in tomllib.loads(block):
        assert getattr(config, name) != "", name


@pytest.mark.parametrize("line", commands())
def test_a_command_is_taken_as_it_stands(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
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
