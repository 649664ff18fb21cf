"""A list of a deployment that does not exist is an error, not an empty table."""

from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import rollouts, serving
from isochrone.cli.client import AdminError
from isochrone.cli.context import CliContext


class Api:
    """An admin API without placements and rollouts, that knows the deployment `chat`."""

    def ask(self, method: str, path: str) -> dict[str, Any]:
        if path != "/v1/deployments/chat":
            raise AdminError(f"cannot find {path}")
        return {}

    def list(self, path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize("command", [serving.placements, rollouts.rollouts_list])
def test_a_list_of_an_unknown_deployment_is_refused(command: Any) -> None:
    api: Any = Api()

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(command, arguments, obj=CliContext(api, "table"))

    assert run().exit_code == run("--deployment", "chat").exit_code == 0
    refused = run("--deployment", "chta")
    assert isinstance(refused.exception, AdminError)
    assert "/v1/deployments/chta" in str(refused.exception)
