"""The fleet that tests of whole systems start: what it says of its engines."""

import json
import os
import subprocess
from pathlib import Path

from tests.postgres import OWNER, remove_orphans
from tests.system.harness import Fleet


def test_an_engine_that_has_not_started_has_no_pid(tmp_path: Path) -> None:
    """Its record says 0, and a signal to 0 ends the group of the process that sends it."""
    fleet = Fleet(tmp_path)
    for node, pid in (("node-ams", 0), ("node-sin", 77)):
        folder = tmp_path / node / "engines" / "r"
        folder.mkdir(parents=True)
        (folder / "process.json").write_text(json.dumps({"pid": pid}))
    assert fleet.engine_pids() == {"node-sin": 77}


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, pid in (("iso-left", ended.pid), ("iso-used", os.getpid()), ("other", ended.pid)):
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_text(str(pid))
    (tmp_path / "iso-unknown").mkdir()
    remove_orphans(tmp_path, "iso-")
    assert {path.name for path in tmp_path.iterdir()} == {"iso-used", "other", "iso-unknown"}
