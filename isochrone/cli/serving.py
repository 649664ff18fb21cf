"""Commands for deployments and placements, and the command `explain`."""

import re
import time
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from isochrone.cli.client import AdminError, AdminUnavailable, segment
from isochrone.cli.context import CliContext
from isochrone.cli.engine import engine_of, engine_options
from isochrone.cli.output import show_one, show_rows, stderr
from isochrone.cli.simple_commands import add_command, list_command, list_of_deployment
from isochrone.wire.engines.engine_capabilities import EngineCapabilities
from isochrone.wire.models.model import ROLES_PATTERN

WAIT_INTERVAL_S: Final = 0.5
PLACEMENT_COLUMNS: Final = [
    "replica_id", "node_id", "pop", "role", "state", "state_reason", "ending", "restarts", "reason"
]  # fmt: skip


@click.command()
@click.argument("deployment")
@click.option("--model", help="Model in the catalogue; required for a new deployment.")
@click.option("--name", help="What clients send as `model` (default: the name of the model).")
@click.option("--min", "replicas_min", type=int, help="Minimum number of replicas, over all PoPs.")
@click.option("--max", "replicas_max", type=int, help="Maximum number of replicas, over all PoPs.")
@click.option(
    "--keep-warm",
    multiple=True,
    help="A PoP that always has a warm replica; repeatable; '' for none.",
)
@click.option(
    "--allow",
    multiple=True,
    help="A PoP or country that may have replicas; repeatable; '' for all.",
)
@click.option(
    "--deny", multiple=True, help="A PoP or country that may not; repeatable; '' for none."
)
@click.option(
    "--priority",
    type=click.IntRange(0, 100),
    help="0 to 100; the higher is placed first when capacity is scarce.",
)
@click.option(
    "--overcommit",
    type=click.FloatRange(1, 64),
    help="Idle replicas sleep and share device memory: 4 plans a quarter of it for each; 1 is off.",
)
@click.option(
    "--awake-min",
    type=click.IntRange(min=0),
    help="With --overcommit: how many never sleep in each PoP.",
)
@click.option(
    "--roles",
    metavar="ROLES",
    help="How a PoP's replicas divide the work: `unified`, a ratio such as `prefill=2,decode=4`, or"
    " `auto` to follow the demand.",
)
@click.option(
    "--prefill-devices",
    multiple=True,
    help="With --roles: a device class (h100-80g) or chip (H100) of prefill replicas; repeatable;"
    " '' for any.",
)
@click.option(
    "--decode-devices",
    multiple=True,
    help="With --roles: a device class or chip of replicas that generate; repeatable; '' for any.",
)
@click.option(
    "--sunset",
    metavar="DATE",
    help="Announce the end: the UTC date (2027-03-31) from which requests are refused, `open` for"
    " none yet, '' to withdraw it.",
)
@click.option("--replacement", help="With --sunset: the name that clients should use instead.")
@engine_options
@click.option("--wait", is_flag=True, help="Wait until a replica is warm.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=600.0,
    show_default=True,
    help="Maximum seconds of --wait.",
)
@click.pass_obj
def deploy(obj: CliContext, /, deployment: str, wait: bool, timeout_s: float, **given: Any) -> None:
    """Create or change a deployment. Options that are not given keep their values."""
    path = f"/v1/deployments/{segment(deployment)}"
    rows = [row for row in obj.api.list("/v1/deployments") if row["deployment_id"] == deployment]
    before = rows[0] if rows else None
    body = _deployment_body(before or {"engine": {}, "policy": {}}, given)
    if before is not None:
        row = obj.api.ask("PUT", path, body, etag=before["etag"])
    elif "model_id" not in body:
        raise click.UsageError("give --model for a new deployment")
    else:
        row = obj.api.ask("POST", "/v1/deployments", {**body, "deployment_id": deployment})
    for line in _derived_sizes(obj, deployment):
        stderr.print(line)
    if wait:
        row = _wait_warm(obj, deployment, timeout_s)
    elif obj.output == "table":
        row.pop("unmet", None)  # of the plan before this change
        stderr.print("planned within seconds: `isochrone status` shows what cannot be placed")
    show_one(row, obj.output)


def _derived_sizes(obj: CliContext, deployment: str) -> list[str]:
    """Return the sizes that follow from the devices of the fleet, in words."""
    try:
        explained = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}/explain")
    except AdminError as error:
        return [f"the sizes are not known yet: {error}"]
    lines = list(explained.get("sizes_in_words", ()))
    if lines:
        return lines
    if not explained.get("here") and not explained.get("elsewhere"):
        return [
            "the sizes are not known yet: no node has joined, so nothing was compared with its"
            " devices"
        ]
    return ["the sizes are not known yet: no device of the fleet can hold a replica"]


def _deployment_body(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    names = {
        "model_id": given["model"] or before.get("model_id"),
        "name": given["name"] or before.get("name"),
    }
    body: dict[str, Any] = {field: value for field, value in names.items() if value}
    bounds = (
        "replicas_min",
        "replicas_max",
        "priority",
        "roles",
        "overcommit",
        "awake_min",
    )
    policy = {name: given[name] for name in bounds if given[name] is not None}
    if "roles" in policy:
        if not re.match(ROLES_PATTERN, policy["roles"]):
            raise click.UsageError(
                f"cannot read roles {policy['roles']!r}: write unified, auto, or a ratio such as"
                " prefill=2,decode=4"
            )
        policy["prefill_share"] = 0.0
    for name in ("keep_warm", "allow", "deny", "prefill_devices", "decode_devices"):
        if given[name]:
            policy[name] = [place for place in given[name] if place]
    body["deprecation"] = _deprecation(before.get("deprecation"), given)
    body["engine"] = engine_of(before["engine"], given)
    body["policy"] = {**before["policy"], **policy}
    return body


def _deprecation(before: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the announcement after the options; raise click.UsageError for an unknown date."""
    sunset, replacement = given["sunset"], given["replacement"]
    if sunset == "" or (before is None and sunset is None):
        if replacement:
            raise click.UsageError("--replacement needs --sunset")
        return None
    announcement = dict(before or {"announced_at": int(time.time())})
    if sunset == "open":
        announcement["sunset_at"] = 0
    elif sunset is not None:
        try:
            day = datetime.strptime(sunset, "%Y-%m-%d").replace(tzinfo=UTC)
        except ValueError:
            raise click.UsageError(
                f"cannot read --sunset {sunset!r}: write a date like 2027-03-31, or open"
            ) from None
        announcement["sunset_at"] = int(day.timestamp())
    if replacement is not None:
        announcement["replacement"] = replacement
    return announcement


def _wait_warm(obj: CliContext, deployment: str, timeout_s: float) -> dict[str, Any]:
    """Return the deployment's row once a replica is warm. Raises AdminError.

    The wait goes on while no scheduler can answer: another one acts within seconds.
    """
    deadline = time.monotonic() + timeout_s
    with stderr.status("waiting for a warm replica") as spinner:
        while True:
            try:
                # In this order, so that the deployment that is shown has the warm replica.
                placed = obj.api.list("/v1/placements", {"deployment_id": deployment})
                row: dict[str, Any] = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}")
            except AdminUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                spinner.update(str(error))
            else:
                if any(_is_warm(placement, row["version"]) for placement in placed):
                    return row
                progress = _progress(row, placed)
                spinner.update(progress)
                if time.monotonic() > deadline:
                    raise AdminError(
                        f"no replica of version {row['version']} is warm after {timeout_s:g} s:"
                        f" {progress}"
                    )
            time.sleep(WAIT_INTERVAL_S)


def _progress(row: dict[str, Any], placed: list[dict[str, Any]]) -> str:
    """Return how far the start of a deployment has come. Raises AdminError if none will start."""
    policy = row["policy"]
    if not (placed or row["unmet"] or policy["replicas_min"] or policy["keep_warm"]):
        raise AdminError(
            "cannot wait for a warm replica: with --min 0 and no --keep-warm the first one"
            " starts when there is demand"
        )
    counts = ", ".join(f"{n} {state}" for state, n in row["replicas"].items())
    reasons = (f"{p['node_id']}: {p['state_reason']}" for p in placed if p["state_reason"])
    return "; ".join((counts or "not placed yet", *row["unmet"], *reasons))


def _is_warm(placement: dict[str, Any], version: int) -> bool:
    """Return True if a placement is warm and of this version; the previous one may stay warm."""
    if placement["ending"] or placement["leader_id"] or placement["version"] != version:
        return False
    return bool(placement["state"] == "warm")


@click.group()
def deployments() -> None:
    """List, show and delete deployments. `deploy` creates and changes them."""


DEPLOYMENT: Final = "/v1/deployments/{deployment}"
DEPLOYMENT_COLUMNS: Final = ["deployment_id", "name", "model_id", "version", "replicas", "unmet"]
deployments.add_command(
    list_command("list", "/v1/deployments", DEPLOYMENT_COLUMNS, "List deployments.")
)
add_command(deployments, "show", "GET", DEPLOYMENT, "Show a deployment.")
add_command(
    deployments, "delete", "DELETE", DEPLOYMENT,
    "Delete a deployment. Its replicas drain and stop.", "{} is being deleted",
)  # fmt: skip


@click.command()
@click.pass_obj
def engines(obj: CliContext) -> None:
    """List the engines, and what each lacks. `-o json` shows all capabilities and options."""
    rows = obj.api.list("/v1/engines")
    if obj.output == "json":
        show_rows(rows, (), obj.output)
        return
    shown = [
        {
            "engine": row["driver"],
            "lacks": ", ".join(row["lacks"]) or "nothing",
            "resumes": row["capabilities"]["resumes"] or "no",
            "adapters": row["capabilities"]["adapters"] or "no",
            "sleep": row["capabilities"]["sleep"] or "no",
            "versions": msgspec.convert(row["capabilities"], EngineCapabilities).versions,
            "options": len(row["options"]),
        }
        for row in rows
    ]
    columns = ["engine", "lacks", "resumes", "adapters", "sleep", "versions", "options"]
    show_rows(shown, columns, obj.output)


@click.command()
@click.option("--deployment", help="Only replicas of this deployment.")
@click.pass_obj
def placements(obj: CliContext, deployment: str | None) -> None:
    """List replicas with node, state and reason."""
    rows = list_of_deployment(obj, "/v1/placements", deployment)
    show_rows(rows, PLACEMENT_COLUMNS, obj.output)


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[deployment] DEPLOYMENT")
@click.pass_obj
def explain(obj: CliContext, words: tuple[str, ...]) -> None:
    """Explain why replicas are where they are, and not elsewhere."""
    *kind, deployment = words
    if kind not in ([], ["deployment"]):
        raise click.UsageError(f"cannot explain {' '.join(words)!r}: name one deployment")
    answer = obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}/explain")
    if obj.output == "json":
        show_one(answer, obj.output)
        return
    for line in (*answer.get("sizes_in_words", ()), *answer.get("roles", ())):
        click.echo(line)
    for title, rows, columns in (
        (
            "here",
            [{**row, "memory": _gibibytes(row.get("memory_bytes"))} for row in answer["here"]],
            ["replica_id", "node_id", "pop", "role", "memory", "state", "reason"],
        ),
        ("elsewhere", answer["elsewhere"], ["node_id", "pop", "feasible", "reason"]),
        ("cities", answer["cities"], ["pop", "requests_per_s", "load", "nearest_pop", "rtt_ms"]),
    ):
        click.echo(f"{title}:")
        show_rows(rows, columns, obj.output)
    # Reasons are not in the table: they quote engines, and would be folded to a few letters a line.
    problems = [(row["replica_id"], row.get("state_reason")) for row in answer["here"]]
    reasons = [f"{replica_id}: {problem}" for replica_id, problem in problems if problem]
    moves = (*answer["next_moves"], *answer["prefetches"], *answer["unmet"], answer["frozen"])
    for line in (*reasons, *moves):
        if line:
            click.echo(line)


def _gibibytes(count: int | None) -> str:
    return f"{count / 2**30:.1f} GiB" if count else ""
