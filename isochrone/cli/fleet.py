"""Commands for the fleet: its status, PoPs, nodes and routers."""

from collections import Counter
from typing import Any, Final

import click

from isochrone.cli.client import segment
from isochrone.cli.context import Context
from isochrone.cli.output import chatter, show_one, show_rows


@click.command()
@click.pass_obj
def status(obj: Context) -> None:
    """Show the state of the fleet, and what is not as wished."""
    show_one(obj.api.ask("GET", "/v1/status"), obj.output)


@click.group()
def pops() -> None:
    """Manage PoPs (sites in cities)."""


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
    """Create or change a PoP, named by IATA code in lower case."""
    body = {"city": city, "country": country, "latitude": latitude, "longitude": longitude}
    show_one(obj.api.ask("PUT", f"/v1/pops/{segment(pop)}", body), obj.output)


@pops.command("delete")
@click.argument("pop")
@click.pass_obj
def pops_delete(obj: Context, pop: str) -> None:
    """Delete an empty PoP."""
    obj.api.ask("DELETE", f"/v1/pops/{segment(pop)}")
    chatter.print(f"deleted {pop}")


@click.group()
def nodes() -> None:
    """Manage nodes (GPU servers)."""


NODE_COLUMNS: Final = [
    "node_id", "pop", "devices", "address", "silent_s", "draining", "revoked", "replicas"
]  # fmt: skip


@nodes.command("list")
@click.pass_obj
def nodes_list(obj: Context) -> None:
    """List nodes."""
    rows = obj.api.list("/v1/nodes")
    if obj.output == "table":
        rows = [{**row, "devices": _devices(row["devices"])} for row in rows]
    show_rows(rows, NODE_COLUMNS, obj.output)


def _devices(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(row["device_class"] for row in rows))


@nodes.command("show")
@click.argument("node")
@click.pass_obj
def nodes_show(obj: Context, node: str) -> None:
    """Show a node with its devices."""
    show_one(obj.api.ask("GET", f"/v1/nodes/{segment(node)}"), obj.output)


@nodes.command("delete")
@click.argument("node")
@click.pass_obj
def nodes_delete(obj: Context, node: str) -> None:
    """Delete a node that is gone and holds no replica. Its certificates are revoked."""
    obj.api.ask("DELETE", f"/v1/nodes/{segment(node)}")
    chatter.print(f"deleted {node}")


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
    """Let a drained node take replicas again."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/undrain"), obj.output)


@nodes.command("revoke")
@click.argument("node")
@click.pass_obj
def nodes_revoke(obj: Context, node: str) -> None:
    """Shut a node out for good."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/revoke"), obj.output)


@nodes.command("readmit")
@click.argument("node")
@click.pass_obj
def nodes_readmit(obj: Context, node: str) -> None:
    """Let a revoked node join again; its old certificates stay refused."""
    show_one(obj.api.ask("POST", f"/v1/nodes/{segment(node)}/readmit"), obj.output)


@nodes.command("join-token")
@click.argument("pop")
@click.option("--role", type=click.Choice(["agent", "router"]), default="agent")
@click.option("--ttl", "ttl_s", type=float, default=900.0, help="Seconds until it expires.")
@click.option(
    "--name", help="Valid for this name only; required for a name that was in use before."
)
@click.option("--uses", "uses_max", type=click.IntRange(1, 10_000), default=1)
@click.pass_obj
def nodes_join_token(
    obj: Context, pop: str, role: str, ttl_s: float, name: str | None, uses_max: int
) -> None:
    """Create a token for nodes or routers to join a PoP. It is shown once."""
    body = {"pop": pop, "role": role, "ttl_s": ttl_s, "name": name, "uses_max": uses_max}
    made = obj.api.ask("POST", "/v1/join-tokens", body)
    if obj.output == "json":
        show_one(made, obj.output)
    else:
        click.echo(made["token"])


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["agent", "router"]), default="agent")
@click.option("--serial", default="", help="One certificate, in hex (default: all of this name).")
@click.option("--reason", default="")
@click.pass_obj
def revoke(obj: Context, name: str, role: str, serial: str, reason: str) -> None:
    """Revoke a peer's certificates.

    From now on, and its conversation with the scheduler is cut.
    """
    body = {"role": role, "name": name, "serial": serial, "reason": reason}
    show_one(obj.api.ask("POST", "/v1/revocations", body), obj.output)


@click.command()
@click.pass_obj
def revocations(obj: Context) -> None:
    """List revoked certificates and names."""
    columns = ["role", "name", "serial", "at", "reason"]
    show_rows(obj.api.list("/v1/revocations"), columns, obj.output)


@click.command()
@click.pass_obj
def routers(obj: Context) -> None:
    """List routers."""
    columns = ["router_id", "pop", "silent_s", "generation", "revoked"]
    show_rows(obj.api.list("/v1/routers"), columns, obj.output)
