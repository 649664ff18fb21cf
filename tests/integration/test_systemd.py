"""The units: systemd takes them, and finds little exposed."""

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


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    # Verified as it would be where the programs are installed.
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


def test_what_engines_use_outlives_their_agent_and_can_be_written() -> None:
    """`systemctl restart` removes what is private to the unit, or its user's alone."""
    unit = UNITS[0].read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match("[A-Z]", line))
    assert settings["KillMode"] == "process"
    assert settings.get("RemoveIPC", "no") == "no"
    told = dict(
        word.split("=")
        for line in re.findall("^Environment=(.*)", unit, re.M)
        for word in line.split()
    )
    assert set(told) == {"HOME", "TMPDIR", "XDG_CACHE_HOME"} <= set(PASSED_ENVIRONMENT)
    assert settings["RuntimeDirectoryPreserve"] == "yes"
    assert told["TMPDIR"] == f"%t/{settings['RuntimeDirectory']}"
    assert told["HOME"] == told["XDG_CACHE_HOME"] == f"%C/{settings['CacheDirectory']}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_libraries_only_try_ends_no_service(unit: Path) -> None:
    """numpy's BLAS places its memory as it is imported; asyncpg looks for certificates at home."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M))
    assert settings["SystemCallErrorNumber"] == "EPERM"
    assert settings["ProtectHome"] == "yes"
    assert "router" in unit.stem or re.search("^Environment=HOME=%[SC]/", unit.read_text(), re.M)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_never_given_up(unit: Path) -> None:
    """A scheduler ends within a second where there is no database: after five times, by default,
    systemd would leave it so."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M))
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == ("always", "0")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_unit_exposes_little(unit: Path) -> None:
    run = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"exposure level.*: (\d+\.\d+)", run.stdout)
    assert match is not None, run.stdout + run.stderr
    assert float(match.group(1)) <= EXPOSURE_MAX
