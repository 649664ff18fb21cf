"""Commands for API keys, usage and events, and the command `chat`."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from isochrone.cli import chat as chat_client
from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.durations import duration_s
from isochrone.cli.output import show_one, show_rows, stderr
from isochrone.cli.simple_commands import add_command

FREE_MODELS_SHOWN: Final = 10

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def keys() -> None:
    """Manage the API keys of clients."""


LIMIT_HELP: Final = {
    "requests_per_min": "Requests per minute over the whole fleet.",
    "tokens_per_min": "Prompt and output tokens per minute over the whole fleet.",
    "concurrency": "Requests at once at each router; each of its processes allows at least one.",
    "tokens_per_day": "Tokens per day (UTC) over the whole fleet.",
    "spend_per_day": "Spend per day (UTC) over the whole fleet, by the models' prices.",
    "tokens_per_month": "Tokens per month (UTC) over the whole fleet.",
    "spend_per_month": "Spend per month (UTC) over the whole fleet.",
}


def limit_options(command: F) -> F:
    """Add an option for each limit to a command."""
    for name, text in reversed(LIMIT_HELP.items()):
        kind = click.FLOAT if name.startswith("spend") else click.INT
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=kind, default=None, help=text)(command)
    return command


@keys.command("create")
@click.argument("tenant")
@click.option("--note", default="", help="A comment that `keys list` shows.")
@click.option(
    "--deployment",
    "deployments",
    multiple=True,
    help="A deployment that the key may use, by id or name; repeatable (default: all).",
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    help="A PoP or country where its requests may be processed; repeatable (default: all).",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=duration_s,
    metavar="DURATION",
    help="When the key expires: seconds, or 15m, 1h, 30d.",
)
@limit_options
@click.pass_obj
def keys_create(
    obj: CliContext,
    /,
    tenant: str,
    note: str,
    deployments: tuple[str, ...],
    regions: tuple[str, ...],
    ttl_s: float | None,
    **limits: float | None,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    body = {
        "tenant_id": tenant,
        "note": note,
        "deployments": list(deployments),
        "regions": list(regions),
        "limits": given_limits(limits),
        "ttl_s": ttl_s,
    }
    made = obj.api.ask("POST", "/v1/keys", body)
    # The key is printed first: it cannot be read again if a request for the warning fails.
    if obj.output == "json":
        show_one(made, obj.output)
    else:
        click.echo(made["key"])
    if regions:
        _warn_of_cold_regions(obj, made)
    note_free_models(obj, limits)


def _warn_of_cold_regions(obj: CliContext, key: dict[str, Any]) -> None:
    """Name the deployments for which no replica is kept in the key's regions."""
    regions = set(key["regions"])
    inside = {
        pop["pop"]
        for pop in obj.api.list("/v1/pops")
        if pop["pop"] in regions or pop["country"] in regions
    }
    cold = [
        deployment["deployment_id"]
        for deployment in obj.api.list("/v1/deployments")
        if not key["deployments"] or deployment["deployment_id"] in key["deployments"]
        if not inside.intersection(deployment["policy"]["keep_warm"])
    ]
    if cold:
        stderr.print(
            f"note: a key starts no replica. While {', '.join(sorted(inside)) or 'its regions'} has"
            f" none of {', '.join(cold)}, its requests get 503: see `deploy --keep-warm`",
            highlight=False,
        )


def note_free_models(obj: CliContext, limits: dict[str, float | None]) -> None:
    """Name the models without a price if a limit of spend is set, because it counts none of them.

    To standard error, after the answer: the limit holds for other models, whatever happens here.
    """
    if not any(limit for name, limit in limits.items() if name.startswith("spend")):
        return
    models = [row["model"] for row in obj.api.list("/v1/models")]
    free = sorted(model["model_id"] for model in models if model["price"] is None)
    if free:
        named = ", ".join(free[:FREE_MODELS_SHOWN]) + (", ..." * (len(free) > FREE_MODELS_SHOWN))
        stderr.print(
            f"note: a limit of spend does not limit {named}: set a price with `isochrone models add"
            " MODEL --price`",
            highlight=False,
        )


@keys.command("limit")
@click.argument("key_id")
@limit_options
@click.pass_obj
def keys_limit(obj: CliContext, /, key_id: str, **limits: float | None) -> None:
    """Change the limits of a key.

    Limits that are not given stay the same; 0 removes a limit.
    """
    if not given_limits(limits):
        raise click.UsageError("give at least one limit")
    path = f"/v1/keys/{segment(key_id)}"
    before = obj.api.ask("GET", path)
    body = {**before["limits"], **given_limits(limits)}
    row = obj.api.ask("PUT", f"{path}/limits", body, etag=before["etag"])
    show_one(row if obj.output == "json" else with_set_limits(row), obj.output)
    note_free_models(obj, limits)


def given_limits(limits: dict[str, float | None]) -> dict[str, float]:
    """Return the limits that were given as options."""
    return {name: value for name, value in limits.items() if value is not None}


def with_set_limits(row: dict[str, Any]) -> dict[str, Any]:
    """Return a key or tenant for a table, with the limits that are set: 0 is none."""
    return {**row, "limits": {name: value for name, value in row["limits"].items() if value}}


@keys.command("list")
@click.pass_obj
def keys_list(obj: CliContext) -> None:
    """List keys without their secrets."""
    rows = obj.api.list("/v1/keys")
    if obj.output == "table":
        rows = [_only_set_limits(row) for row in rows]
    columns = [
        "key_id", "tenant_id", "note", "deployments", "regions", "limits", "tokens_today",
        "expires_at", "revoked",
    ]  # fmt: skip
    show_rows(rows, columns, obj.output)


def _only_set_limits(row: dict[str, Any]) -> dict[str, Any]:
    """Remove limits of 0, and today's count if the key has no daily quota that it belongs to."""
    shown = with_set_limits(row)
    has_quota = "tokens_per_day" in shown["limits"] or "spend_per_day" in shown["limits"]
    return {**shown, "tokens_today": row["tokens_today"] if has_quota else None}


add_command(
    keys, "revoke", "DELETE", "/v1/keys/{key_id}", "Revoke a key permanently.", "revoked {}"
)


@click.command()
@click.option("--tenant", "tenant_id", help="Only this tenant.")
@click.option("--key", "key_id", metavar="KEY_ID", help="Only this key.")
@click.option(
    "--from", metavar="DAY", help="First day (UTC), such as 2026-01-31 (default: a week ago)."
)
@click.option("--to", metavar="DAY", help="Last day (UTC), at most 31 days later (default: today).")
@click.option(
    "--by",
    type=click.Choice(["key", "tenant"]),
    default="key",
    show_default=True,
    help="One row per key or tenant.",
)
@click.option(
    "--per",
    type=click.Choice(["total", "day"]),
    default="total",
    show_default=True,
    help="Totals, or one row per day.",
)
@click.pass_obj
def usage(obj: CliContext, /, **filters: str | None) -> None:
    """Show usage of each deployment by key or tenant.

    Spend is computed with current prices.
    """
    rows = obj.api.list("/v1/usage", {name: text for name, text in filters.items() if text})
    columns = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", "spend"]
    shown = [
        "tenant_id",
        *(["key_id"] if filters["by"] == "key" else []),
        "deployment_id",
        *columns,
    ]
    show_rows(rows, ["day", *shown] if filters["per"] == "day" else shown, obj.output)


@click.command()
@click.option(
    "--limit",
    type=click.IntRange(1, 500),
    default=50,
    show_default=True,
    help="Number of events.",
)
@click.option("--subject", help="Only events of this node, deployment, key or other object.")
@click.pass_obj
def events(obj: CliContext, limit: int, subject: str | None) -> None:
    """List events, newest first."""
    query = {"limit": str(limit)} | ({"subject": subject} if subject else {})
    rows = obj.api.ask("GET", "/v1/events", query=query)["data"]
    if subject and not rows:
        # Not refused: a deleted object remains a subject until its events are deleted too.
        stderr.print(f"note: no event of {subject!r} is kept; `events` without --subject names all")
    show_rows(rows, ["at", "actor", "kind", "subject", "reason"], obj.output)


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option(
    "--endpoint",
    envvar="ISOCHRONE_ENDPOINT",
    show_envvar=True,
    required=True,
    help="Router URL.",
)
@click.option("--key", envvar="ISOCHRONE_API_KEY", show_envvar=True, required=True, help="API key.")
@click.option(
    "--max-tokens", type=int, default=256, show_default=True, help="Maximum length of the answer."
)
@click.pass_obj
def chat(
    obj: CliContext, model: str, prompt: str, endpoint: str, key: str, max_tokens: int
) -> None:
    """Send a prompt to a model through a router.

    The answer streams to standard output. PoP, node and timing go to standard error. With `-o json`
    all of it is one object.
    """
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens}
    is_json = obj.output == "json"
    texts: list[str] = []

    def write(text: str) -> None:
        texts.append(text)
        if not is_json:
            click.echo(text, nl=False)

    try:
        result = asyncio.run(chat_client.chat(endpoint=endpoint, key=key, body=body, on_text=write))
    except chat_client.ChatFailed:
        if texts and not is_json:
            click.echo()  # the error begins a line
        raise
    if is_json:
        show_one(result._asdict(), obj.output)
        return
    click.echo()
    if not result.text:
        stderr.print(
            f"note: the answer has no text in {result.output_tokens} tokens; a model that reasons"
            " first may need more: --max-tokens"
        )
    stderr.print(
        f"{result.pop} {result.node} ({result.why}) TTFT {result.ttft_ms:.0f} ms, "
        f"{result.output_tokens} tokens, {result.tokens_per_s:.1f} tokens/s, "
        f"{result.cached_tokens} cached"
    )
