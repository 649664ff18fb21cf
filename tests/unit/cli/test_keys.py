"""`keys create` prints the key, whatever happens afterwards."""

from typing import Any

from click.testing import CliRunner

from isochrone.cli import access
from isochrone.cli.client import AdminError
from isochrone.cli.context import CliContext


class LostApi:
    """An admin API that is lost after it has made a key."""

    def ask(self, *_: Any) -> dict[str, Any]:
        return {"key": "iso_1_secret", "regions": ["NL"], "deployments": []}

    def list(self, _: str) -> list[dict[str, Any]]:
        raise AdminError("cannot reach the admin API")


def test_a_key_is_printed_before_anything_can_fail() -> None:
    api: Any = LostApi()
    result = CliRunner().invoke(
        access.keys_create, ["acme", "--region", "NL"], obj=CliContext(api, "table")
    )
    assert (result.exit_code, result.stdout) == (1, "iso_1_secret\n")
