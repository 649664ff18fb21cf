"""What `deploy --wait` waits for."""

from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import serving
from isochrone.cli.context import CliContext


class Api:
    """A deployment whose new version is warm at the second look."""

    def __init__(self) -> None:
        self.row = {"deployment_id": "d", "etag": 1, "engine": {}, "policy": {}, "unmet": []}
        self.row |= {"version": 2, "replicas": {"warm": 1}}
        self.looks = 0

    def ask(self, *asked: Any, **more: Any) -> dict[str, Any]:
        return self.row

    def list(self, path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        if path == "/v1/deployments":
            return [self.row]
        self.looks += 1
        old = {"version": 1, "state": "warm", "ending": False, "leader_id": "", "state_reason": ""}
        new = {**old, "version": 2}
        return [old] if self.looks < 2 else [old, new]


def test_it_waits_for_the_version_that_was_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WAIT_INTERVAL_S", 0.0)
    api: Any = Api()
    ran = CliRunner().invoke(
        serving.deploy, ["d", "--model", "new", "--wait"], obj=CliContext(api, "json")
    )
    assert ran.exit_code == 0, ran.output
    assert api.looks == 2
