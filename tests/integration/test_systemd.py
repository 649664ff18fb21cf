"""The systemd units are valid and have a low exposure level."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.host.processes import PASSED_ENVIRONMENT

UNITS = sorted((Path(__file__).parents[2] / "ops" / "systemd").glob("*.service"))
EXPOSURE_MAX = 2.0

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def test_every_service_has_a_unit() -> None:
    assert [unit.stem for unit in UNITS] == [
        "isochrone-nodeagent",
        "isochrone-router",
        "isochrone-scheduler",
    ]


def test_memory_is_limited_where_strangers_connect() -> None:
    """An agent's unit has no limit: a model's weights may fill the memory."""
    limited = [
        unit.stem for unit in UNITS if re.search(r"^MemoryMax=\d+G$", unit.read_text(), re.M)
    ]
    assert limited == ["isochrone-router", "isochrone-scheduler"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    # Verified with a program that exists on this machine.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.M)
    copy = tmp_path / unit.name
    copy.write_text(text)
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert unit.name not in run.stderr, run.stderr


def test_files_of_engines_outlive_the_agent_and_are_writable() -> None:
    """`systemctl restart` removes the unit's private folders and its user's shared memory."""
    unit = UNITS[0].read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match("[A-Z]", line))
    assert settings["KillMode"] == "process"
    assert settings.get("RemoveIPC", "no") == "no"
    environment = dict(
        word.split("=")
        for line in re.findall("^Environment=(.*)", unit, re.M)
        for word in line.split()
    )
    assert set(environment) == {"HOME", "TMPDIR", "XDG_CACHE_HOME"} <= set(PASSED_ENVIRONMENT)
    assert settings["RuntimeDirectoryPreserve"] == "yes"
    assert environment["TMPDIR"] == f"%t/{settings['RuntimeDirectory']}"
    assert (
        environment["HOME"] == environment["XDG_CACHE_HOME"] == f"%C/{settings['CacheDirectory']}"
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_forbidden_system_call_does_not_kill_a_service(unit: Path) -> None:
    """numpy's BLAS sets a memory policy on import; asyncpg reads certificates in $HOME."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M))
    assert settings["SystemCallErrorNumber"] == "EPERM"
    assert settings["ProtectHome"] == "yes"
    assert "router" in unit.stem or re.search("^Environment=HOME=%[SC]/", unit.read_text(), re.M)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_restarts_without_limit(unit: Path) -> None:
    """Without a database a scheduler exits within a second; by default, systemd would give up after
    five restarts."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M))
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == ("always", "0")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_unit_has_a_low_exposure_level(unit: Path) -> None:
    run = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"exposure level.*: (\d+\.\d+)", run.stdout)
    assert match is not None, run.stdout + run.stderr
    assert float(match.group(1)) <= EXPOSURE_MAX
