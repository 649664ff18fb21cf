"""`isochrone plan` refuses options that it would ignore."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import planning
from isochrone.cli.context import CliContext


@pytest.mark.parametrize("option", [("--lose-pop", "ams"), ("--map", "after.png")])
def test_a_change_without_a_snapshot_to_change_is_refused(
    option: tuple[str, str], tmp_path: Path
) -> None:
    api: Any = None
    saved = tmp_path / "fleet.json"
    result = CliRunner().invoke(
        planning.plan, ["--save", str(saved), *option], obj=CliContext(api, "table")
    )
    assert result.exit_code == 2
    assert f"{option[0]} needs --what-if FILE" in result.stderr
    assert not saved.exists()


@pytest.mark.parametrize("node", ["ams=cpux0@8", "ams=x2@8", "ams=cpux2@0", "ams=cpu"])
def test_a_node_without_devices_is_refused(node: str, tmp_path: Path) -> None:
    api: Any = None
    (tmp_path / "fleet.json").touch()
    arguments = ["--what-if", str(tmp_path / "fleet.json"), "--add-node", node]
    result = CliRunner().invoke(planning.plan, arguments, obj=CliContext(api, "table"))
    assert (result.exit_code, f"cannot read the node '{node}'" in result.stderr) == (2, True)
