"""A confined engine works, and reaches neither the agent's files and process nor other engines'."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from isochrone.service.config import ConfigError
from isochrone.service.trust.landlock import WHOLE_VERSION, landlock_version
from nodeagent.host import confinement
from nodeagent.host.confinement import EngineConfinement, engine_confinement
from nodeagent.host.processes import spawn

needs_landlock = pytest.mark.skipif(
    landlock_version() < WHOLE_VERSION, reason="needs a kernel with Landlock (Linux 5.19)"
)
SIGNALS_VERSION: Final = 6

SNOOP: Final = """
import json, os, subprocess, sys
state, parent = sys.argv[1], int(sys.argv[2])
own = f"{state}/engines/own"
def tried(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return ""
def write(path):
    with open(path, "a") as file:
        file.write("x")
json.dump({
    "own": tried(lambda: write(f"{own}/new")),
    "rename": tried(lambda: os.replace(f"{own}/new", f"{own}/folder/renamed")),
    "beside": tried(lambda: write(f"{state}/../beside/new")),
    "weights": tried(lambda: open(f"{state}/artifacts/weights").read()),
    "list": tried(lambda: os.listdir(state)),
    "import": tried(lambda: __import__("msgspec")),
    "change weights": tried(lambda: write(f"{state}/artifacts/weights")),
    "truncate weights": tried(lambda: os.truncate(f"{state}/artifacts/weights", 0)),
    "delete weights": tried(lambda: os.unlink(f"{state}/artifacts/weights")),
    "key": tried(lambda: open(f"{state}/identity.json").read()),
    "key by a link": tried(lambda: open(f"{state}/../link/identity.json").read()),
    "configuration": tried(lambda: open(f"{state}/../node.toml").read()),
    "other": tried(lambda: open(f"{state}/engines/other/config.json").read()),
    "change other": tried(lambda: write(f"{state}/engines/other/config.json")),
    "key by a process": tried(lambda: open(f"/proc/{parent}/root{state}/identity.json").read()),
    "memory": tried(lambda: open(f"/proc/{parent}/mem", "rb")),
    "signal": tried(lambda: os.kill(parent, 0)),
    "child": subprocess.call(["cat", f"{state}/identity.json"], stderr=subprocess.DEVNULL),
}, sys.stdout)
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of an agent with two engines, and what is beside it."""
    state = tmp_path / "node"
    files = (
        *("artifacts/weights", "identity.json", "engines/own/folder/file"),
        *("engines/other/config.json", "../beside/file", "../node.toml"),
    )
    for name in files:
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / "link").symlink_to(state)
    return state


@needs_landlock
def test_an_engine_reaches_its_own_files_and_no_others(state: Path) -> None:
    confined = EngineConfinement([state, state.parent / "node.toml"], state / "artifacts")
    own = state / "engines" / "own"
    command = (sys.executable, "-c", SNOOP, str(state), str(os.getpid()))
    child = spawn(command, own / "engine.log", rules=confined.rules(own))
    assert child.wait(60) == 0, (own / "engine.log").read_text()
    found = json.loads((own / "engine.log").read_text())
    allowed = ("own", "rename", "beside", "weights", "list", "import")
    assert {name: found.pop(name) for name in allowed} == dict.fromkeys(allowed, "")
    assert found.pop("child") == 1
    if landlock_version() < SIGNALS_VERSION:
        assert found.pop("signal") == ""
    assert found == dict.fromkeys(found, "PermissionError")
    assert (state / "artifacts/weights").read_text() == "text"


@needs_landlock
def test_a_program_that_is_missing_or_fails_is_told_as_without_confinement(state: Path) -> None:
    rules = EngineConfinement([state], state / "artifacts").rules(state / "engines" / "own")
    log = state / "engines" / "own" / "engine.log"
    with pytest.raises(FileNotFoundError, match="cannot start vllm-of-nowhere: it is not on the"):
        spawn(("vllm-of-nowhere", "serve"), log, rules=rules)
    command = ("sh", "-c", "echo $NUMBER >&2; exit $NUMBER")
    child = spawn(command, log, {"NUMBER": "7"}, rules=rules)
    assert child.wait(60) == 7
    assert log.read_text() == "7\n"
    open_files = subprocess.run(
        ["ls", "/proc/self/fd"], capture_output=True, text=True, check=True
    ).stdout
    child = spawn(("ls", "/proc/self/fd"), log, rules=rules)
    assert child.wait(60) == 0
    assert log.read_text() == f"7\n{open_files}", "the engine does not keep the ruleset"


def test_an_old_kernel_is_told_or_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: WHOLE_VERSION - 1)
    places = ([state], state / "artifacts")
    assert engine_confinement("never", *places) is None
    assert not caplog.records
    assert engine_confinement("auto", *places) is None
    assert "engines can read the agent's files: this kernel has no Landlock" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot confine engines: .* use Linux 5\.19"):
        engine_confinement("always", *places)
    monkeypatch.setattr(confinement, "landlock_version", lambda: WHOLE_VERSION)
    monkeypatch.setenv("XDG_CACHE_HOME", str(state / "home" / "cache"))
    assert engine_confinement("always", *places) is not None
    assert (state / "home" / "cache").is_dir(), "engines could not make it beside closed files"
