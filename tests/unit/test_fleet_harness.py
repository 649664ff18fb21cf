"""The fleet that tests of whole systems start: what it says of its engines."""

import json
from pathlib import Path

from tests.system.harness import Fleet


def test_an_engine_that_has_not_started_has_no_pid(tmp_path: Path) -> None:
    """Its record says 0, and a signal to 0 ends the group of the process that sends it."""
    fleet = Fleet(tmp_path)
    for node, pid in (("node-ams", 0), ("node-sin", 77)):
        folder = tmp_path / node / "engines" / "r"
        folder.mkdir(parents=True)
        (folder / "process.json").write_text(json.dumps({"pid": pid}))
    assert fleet.engine_pids() == {"node-sin": 77}
