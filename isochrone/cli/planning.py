"""`isochrone plan`: save a snapshot of the cluster, and simulate changes to it.

`python -m scheduler what-if` plans in a process of its own on this machine. It needs no fleet, and
a large simulation does not load the acting scheduler.
"""

import math
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from isochrone.cli.client import AdminError
from isochrone.cli.context import CliContext
from isochrone.cli.output import show_one, show_rows, stderr
from isochrone.cli.world_map import draw
from isochrone.service.files import write_atomic

PLAN_TIMEOUT_S: Final = 600.0
MOVES_SHOWN: Final = 40
GIB: Final = 1024**3


@click.command()
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Save a snapshot of the cluster to a file.",
)
@click.option(
    "--what-if",
    "snapshot",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Plan from a saved snapshot; without changes, replay it.",
)
@click.option(
    "--add-node", multiple=True, help="Add a node: POP=CLASSxDEVICES@GIB, as ams=h100-80gx8@80."
)
@click.option("--lose-pop", multiple=True, help="Remove a PoP.")
@click.option("--lose-node", multiple=True, help="Remove a node.")
@click.option(
    "--demand", multiple=True, help="Multiply demand: [DEPLOYMENT@]CITY=FACTOR; * is every city."
)
@click.option(
    "--add-deployment",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON file with deployment, demand_like, demand_factor, and the model if it is new.",
)
@click.option("--price", multiple=True, help="Cost of a device per hour: CLASS=COST.")
@click.option("--map", "map_to", type=click.Path(path_type=Path), help="Write a world map (PNG).")
@click.pass_obj
def plan(obj: CliContext, /, save: Path | None, snapshot: Path | None, **options: Any) -> None:
    """Save a snapshot of the cluster, or simulate changes to one.

    Simulations run on this machine and need no fleet.
    """
    if save is None and snapshot is None:
        raise click.UsageError("give --save FILE, or --what-if FILE")
    if snapshot is None and (ignored := [name for name, value in options.items() if value]):
        flag = ignored[0].removesuffix("_to").replace("_", "-")
        raise click.UsageError(f"--{flag} needs --what-if FILE, a snapshot that --save has written")
    if save is not None:
        saved = obj.api.ask("GET", "/v1/snapshot")
        try:
            write_atomic(save, msgspec.json.encode(saved))
        except OSError as error:
            raise AdminError(f"cannot write {save}: {error.strerror}") from error
        stderr.print(f"saved {save}: {save.stat().st_size >> 10} KiB")
    if snapshot is None:
        return
    prices = _prices(options["price"])
    result = _simulate(snapshot, _changes(options), prices)
    _show(result, obj.output, priced=set(prices))
    if options["map_to"] is not None:
        pops = msgspec.json.decode(snapshot.read_bytes())["cluster"]["pops"]
        draw(result, pops, options["map_to"])
        stderr.print(f"wrote {options['map_to']}")


def _simulate(snapshot: Path, changes: list[Any], prices: dict[str, float]) -> dict[str, Any]:
    command = [sys.executable, "-m", "scheduler", "what-if", str(snapshot)]
    command += ["--changes", msgspec.json.encode(changes).decode()]
    command += ["--prices", msgspec.json.encode(prices).decode()]
    with stderr.status(f"planning {snapshot}"):
        try:
            done = subprocess.run(command, capture_output=True, timeout=PLAN_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise AdminError(f"cannot plan {snapshot} within {PLAN_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().removeprefix("Error: ")
        last_line = message.splitlines()[-1] if message else ""
        raise AdminError(last_line or f"cannot plan {snapshot}: exit code {done.returncode}")
    result: dict[str, Any] = msgspec.json.decode(done.stdout)
    return result


def _changes(options: dict[str, Any]) -> list[Any]:
    return [
        *(_add_nodes_change(text) for text in options["add_node"]),
        *({"type": "lose_pop", "pop": pop} for pop in options["lose_pop"]),
        *({"type": "lose_node", "node_id": node} for node in options["lose_node"]),
        *(_scale_demand_change(text) for text in options["demand"]),
        *(
            {"type": "add_deployment", **_read_json(path)}
            for path in options["add_deployment"]
        ),
    ]  # fmt: skip


def _add_nodes_change(text: str) -> dict[str, Any]:
    try:
        pop, _, kind = text.partition("=")
        kind, _, gib = kind.rpartition("@")
        device_class, _, devices = kind.rpartition("x")
        change: dict[str, Any] = {
            "type": "add_nodes",
            "pop": pop,
            "device_class": device_class,
            "devices": int(devices),
            "memory_bytes": int(float(gib) * GIB),
        }
        if not device_class or change["devices"] < 1 or change["memory_bytes"] < 1:
            raise ValueError(text)
        return change
    except (ValueError, OverflowError) as error:
        raise click.UsageError(
            f"cannot read the node {text!r}: write ams=h100-80gx8@80 for 8 devices of 80 GiB in ams"
        ) from error


def _scale_demand_change(text: str) -> dict[str, Any]:
    where, _, factor = text.rpartition("=")
    deployment, _, city = where.rpartition("@")
    try:
        change: dict[str, Any] = {"type": "scale_demand", "factor": _number(factor)}
    except ValueError as error:
        raise click.UsageError(
            f"cannot read the demand {text!r}: write ams=2 for twice as much"
        ) from error
    if city not in ("", "*"):
        change["pop"] = city
    if deployment:
        change["deployment_id"] = deployment
    return change


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (msgspec.DecodeError, OSError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error


def _prices(texts: tuple[str, ...]) -> dict[str, float]:
    pairs = [text.partition("=") for text in texts]
    try:
        return {name: _number(cost) for name, _, cost in pairs}
    except ValueError as error:
        all_prices = ", ".join(texts)
        raise click.UsageError(
            f"cannot read the prices {all_prices}: write h100-80g=2.5"
        ) from error


def _number(text: str) -> float:
    """Return a finite number of at least 0; else raise ValueError."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


def _show(result: dict[str, Any], output: str, *, priced: Set[str]) -> None:
    if output == "json":
        show_one(result, output)
        return
    moves = result["moves"]
    click.echo("; ".join(result["changes"]) or "unchanged snapshot")
    rest = "" if result["is_at_rest"] else ", more moves would follow"
    click.echo(f"moves: {len(moves)}, rounds: {result['rounds']}{rest}; plan {result['digest']}")
    if moves:
        columns = ["kind", "deployment_id", "node_id", "pop", "role", "reason"]
        show_rows(moves[:MOVES_SHOWN], columns, output)
    if len(moves) > MOVES_SHOWN:
        click.echo(f"and {len(moves) - MOVES_SHOWN} more (-o json shows all)")
    for line in (*result["unmet"], result["frozen"]):
        if line:
            click.echo(line)
    now, then = result["now"], result["then"]
    click.echo("\nusers:")
    columns = ["pop", "requests_per_s", "ttft_p90_ms", "then", "unserved_per_s"]
    show_rows(_beside(now["cities"], then["cities"], "ttft_p90_ms"), columns, output)
    click.echo("\nPoPs:")
    columns = ["pop", "nodes", "replicas", "then", "load", "memory"]
    show_rows(_beside(now["pops"], then["pops"], "replicas"), columns, output)
    click.echo("\ndevices:")
    shown = "cost_per_hour" if priced else "used"
    rows = [
        row if not priced or row["device_class"] in priced else {**row, shown: None, "then": None}
        for row in _beside(now["devices"], then["devices"], shown, by="device_class")
    ]
    show_rows(rows, ["device_class", "devices", shown, "then"], output)
    if not priced:
        click.echo("--price CLASS=COST adds the cost")
    if then["assumed_rates"]:
        names = ", ".join(then["assumed_rates"])
        click.echo(
            "\nthe rates of these are assumed, because no replica has served enough to measure"
            f" them yet: {names}"
        )


def _beside(
    now: list[dict[str, Any]], then: list[dict[str, Any]], field: str, by: str = "pop"
) -> list[dict[str, Any]]:
    """Join rows before and after: `field` is the value before, `then` the one after.

    Other fields are of after, where the row still exists. Rows are matched by the field `by`.
    """
    before = {row[by]: row for row in now}
    after = {row[by]: row for row in then}
    return [
        {
            **after.get(name, {by: name}),
            field: before.get(name, {}).get(field),
            "then": after.get(name, {}).get(field),
        }
        for name in sorted(before | after)
    ]
