"""What the commands for keys and tenants print."""

from typing import Any, Final

import click
import pytest
from click.testing import CliRunner

from isochrone.cli import access, tenants
from isochrone.cli.client import AdminError
from isochrone.cli.context import CliContext
from isochrone.cli.main import main


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


class LimitedApi:
    """An admin API with a key and a tenant that have one limit."""

    row: Final = {
        "key_id": "k1",
        "tenant_id": "acme",
        "limits": {"requests_per_min": 0, "tokens_per_day": 100},
        "etag": 1,
    }

    def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.row

    def list(self, _: str) -> list[dict[str, Any]]:
        return [self.row]


@pytest.mark.parametrize(
    ("command", "name"), [(access.keys_limit, "k1"), (tenants.tenants_limit, "acme")]
)
def test_a_limit_that_is_not_set_is_no_limit_of_0(command: click.Command, name: str) -> None:
    api: Any = LimitedApi()
    context = CliContext(api, "table")
    result = CliRunner().invoke(command, [name, "--tokens-per-day", "100"], obj=context)
    assert (result.exit_code, "tokens_per_day=100" in result.stdout) == (0, True)
    assert "requests_per_min" not in result.stdout


@pytest.mark.parametrize(("token", "words"), [("a\nb", "not one line"), (" a\r\n", "refused")])
def test_a_token_is_one_line(token: str, words: str) -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--token", token, "status"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, words in result.stderr) == (1, True)
