"""Commands for keys, usage and events; and `chat`."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import click

from isochrone.cli import chat as one_chat
from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.output import chatter, show_one, show_rows
from isochrone.cli.simple_commands import add_command

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def keys() -> None:
    """Manage clients' API keys."""


LIMIT_HELP: Final = {
    "requests_per_min": "Requests a minute at each router.",
    "tokens_per_min": "Prompt and output tokens a minute at each router.",
    "concurrency": "Requests at once at each router; at least one in each of its processes.",
    "tokens_per_day": "Tokens a day (UTC) over the whole fleet.",
    "spend_per_day": "Spend a day (UTC) over the whole fleet, by the models' prices.",
}


def limit_options(command: F) -> F:
    """Give a command an option for each limit; 0 lifts it."""
    for name, text in reversed(LIMIT_HELP.items()):
        kind = click.FLOAT if name == "spend_per_day" else click.INT
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=kind, default=None, help=text)(command)
    return command


@keys.command("create")
@click.argument("tenant")
@click.option("--note", default="")
@click.option(
    "--deployment",
    "deployments",
    multiple=True,
    help="A deployment it may use; repeat it (default: all).",
)
@click.option("--ttl", "ttl_s", type=float, default=None, help="Seconds until it expires.")
@limit_options
@click.pass_obj
def keys_create(
    obj: CliContext,
    /,
    tenant: str,
    note: str,
    deployments: tuple[str, ...],
    ttl_s: float | None,
    **limits: float | None,
) -> None:
    """Create a key. It is shown once."""
    body = {
        "tenant_id": tenant,
        "note": note,
        "deployments": list(deployments),
        "limits": _given(limits),
        "ttl_s": ttl_s,
    }
    made = obj.api.ask("POST", "/v1/keys", body)
    if obj.output == "json":
        show_one(made, obj.output)
    else:
        click.echo(made["key"])


@keys.command("limit")
@click.argument("key_id")
@limit_options
@click.pass_obj
def keys_limit(obj: CliContext, /, key_id: str, **limits: float | None) -> None:
    """Change the limits of a key. A limit that is not given stays; 0 removes it."""
    if not _given(limits):
        raise click.UsageError("give at least one limit")
    path = f"/v1/keys/{segment(key_id)}"
    before = obj.api.ask("GET", path)
    body = {**before["limits"], **_given(limits)}
    show_one(obj.api.ask("PUT", f"{path}/limits", body, etag=before["etag"]), obj.output)


def _given(limits: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in limits.items() if value is not None}


@keys.command("list")
@click.pass_obj
def keys_list(obj: CliContext) -> None:
    """List keys, without their secrets."""
    rows = obj.api.list("/v1/keys")
    if obj.output == "table":
        rows = [_as_limited(row) for row in rows]
    columns = [
        "key_id", "tenant_id", "note", "deployments", "limits", "tokens_today",
        "expires_at", "revoked",
    ]  # fmt: skip
    show_rows(rows, columns, obj.output)


def _as_limited(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out limits that do not hold, and a count that is kept for keys with a quota alone."""
    limits = {name: value for name, value in row["limits"].items() if value}
    is_counted = "tokens_per_day" in limits or "spend_per_day" in limits
    return {**row, "limits": limits, "tokens_today": row["tokens_today"] if is_counted else None}


add_command(keys, "revoke", "DELETE", "/v1/keys/{key_id}", "Revoke a key for good.", "revoked {}")


@click.command()
@click.option("--tenant", "tenant_id", help="Only this tenant.")
@click.option("--key", "key_id", metavar="KEY_ID", help="Only this key.")
@click.option("--from", metavar="DAY", help="First day (UTC), as 2026-01-31 (default: a week ago).")
@click.option("--to", metavar="DAY", help="Last day (UTC; default: today); at most 31 days.")
@click.option("--by", type=click.Choice(["key", "tenant"]), default="key")
@click.option("--per", type=click.Choice(["total", "day"]), default="total")
@click.pass_obj
def usage(obj: CliContext, /, **asked: str | None) -> None:
    """Show usage by key or tenant.

    Of each deployment; spend by the prices of today.
    """
    rows = obj.api.list("/v1/usage", {name: text for name, text in asked.items() if text})
    columns = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", "spend"]
    shown = ["tenant_id", *(["key_id"] if asked["by"] == "key" else []), "deployment_id", *columns]
    show_rows(rows, ["day", *shown] if asked["per"] == "day" else shown, obj.output)


@click.command()
@click.option("--limit", type=click.IntRange(1, 500), default=50)
@click.option("--subject")
@click.pass_obj
def events(obj: CliContext, limit: int, subject: str | None) -> None:
    """List what happened, newest first."""
    query = {"limit": str(limit)} | ({"subject": subject} if subject else {})
    rows = obj.api.ask("GET", "/v1/events", query=query)["data"]
    show_rows(rows, ["at", "actor", "kind", "subject", "reason"], obj.output)


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--endpoint", envvar="ISOCHRONE_ENDPOINT", required=True, help="http://host:8080.")
@click.option("--key", envvar="ISOCHRONE_API_KEY", required=True)
@click.option("--max-tokens", type=int, default=256)
def chat(model: str, prompt: str, endpoint: str, key: str, max_tokens: int) -> None:
    """Ask a model through a router.

    The answer streams to standard output; where it was made, and how soon, goes to standard error.
    """
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens}
    write = partial(click.echo, nl=False)
    served = asyncio.run(one_chat.chat(endpoint=endpoint, key=key, body=body, on_text=write))
    click.echo()
    chatter.print(
        f"{served.pop} {served.node} ({served.why}) TTFT {served.ttft_ms:.0f} ms, "
        f"{served.output_tokens} tokens, {served.tokens_per_s:.1f} tokens/s, "
        f"{served.cached_tokens} cached"
    )
