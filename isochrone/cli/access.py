"""Commands on who may ask and what was done; and asking."""

import click

from isochrone.cli.chat import stream_chat
from isochrone.cli.client import segment
from isochrone.cli.context import Context
from isochrone.cli.output import chatter, show_one, show_rows


@click.group()
def keys() -> None:
    """Clients' keys."""


@keys.command("create")
@click.argument("tenant")
@click.option("--note", default="")
@click.option("--deployment", "deployments", multiple=True, help="What it may ask for.")
@click.option("--requests-per-min", type=int, default=0)
@click.option("--tokens-per-min", type=int, default=0)
@click.option("--concurrency", type=int, default=0)
@click.option("--ttl", "ttl_s", type=float, default=None, help="Seconds until it expires.")
@click.pass_obj
def keys_create(
    obj: Context,
    tenant: str,
    note: str,
    deployments: tuple[str, ...],
    requests_per_min: int,
    tokens_per_min: int,
    concurrency: int,
    ttl_s: float | None,
) -> None:
    """Make a key. Shown once."""
    limits = {
        "requests_per_min": requests_per_min,
        "tokens_per_min": tokens_per_min,
        "concurrency": concurrency,
    }
    body = {
        "tenant_id": tenant,
        "note": note,
        "deployments": list(deployments),
        "limits": limits,
        "ttl_s": ttl_s,
    }
    made = obj.api.ask("POST", "/v1/keys", body)
    if obj.output == "json":
        show_one(made, obj.output)
    else:
        click.echo(made["key"])


@keys.command("list")
@click.pass_obj
def keys_list(obj: Context) -> None:
    """List keys, without their secrets."""
    columns = ["key_id", "tenant_id", "note", "deployments", "limits", "revoked"]
    show_rows(obj.api.list("/v1/keys"), columns, obj.output)


@keys.command("revoke")
@click.argument("key_id")
@click.pass_obj
def keys_revoke(obj: Context, key_id: str) -> None:
    """Revoke a key for good."""
    obj.api.ask("DELETE", f"/v1/keys/{segment(key_id)}")
    chatter.print(f"revoked {key_id}")


@click.command()
@click.option("--limit", type=click.IntRange(1, 500), default=50)
@click.option("--subject")
@click.pass_obj
def events(obj: Context, limit: int, subject: str | None) -> None:
    """What was done, the newest first."""
    query = {"limit": str(limit)} | ({"subject": subject} if subject else {})
    rows = obj.api.ask("GET", "/v1/events", query=query)["data"]
    show_rows(rows, ["event_id", "actor", "kind", "subject", "reason"], obj.output)


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--endpoint", envvar="ISOCHRONE_ENDPOINT", required=True, help="http://host:8080.")
@click.option("--key", envvar="ISOCHRONE_API_KEY", required=True)
@click.option("--max-tokens", type=int, default=256)
def chat(model: str, prompt: str, endpoint: str, key: str, max_tokens: int) -> None:
    """Ask a model through a router, streaming; where it was answered goes to standard error."""
    served = stream_chat(
        endpoint=endpoint,
        key=key,
        body={
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
        },
        on_text=lambda text: click.echo(text, nl=False),
    )
    click.echo()
    chatter.print(
        f"{served.pop} {served.node} ({served.why}) TTFT {served.ttft_ms:.0f} ms, "
        f"{served.output_tokens} tokens, {served.tokens_per_s:.1f} tokens/s, "
        f"{served.cached_tokens} cached"
    )
