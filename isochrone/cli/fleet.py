"""Commands for the fleet: its status, PoPs, nodes and routers."""

from collections import Counter
from typing import Any, Final

import click

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.durations import duration_s
from isochrone.cli.output import show_one, show_rows
from isochrone.cli.simple_commands import add_command, list_command


@click.command()
@click.pass_obj
def status(obj: CliContext) -> None:
    """Show the fleet and what differs from the desired state."""
    show_one(obj.api.ask("GET", "/v1/status"), obj.output)


@click.group()
def pops() -> None:
    """Manage PoPs (sites in cities)."""


@pops.command("add")
@click.argument("pop")
@click.option("--city", required=True, help="Name of the city.")
@click.option("--country", required=True, help="Two-letter country code, such as NL.")
@click.option("--latitude", type=float, required=True, help="Degrees north.")
@click.option("--longitude", type=float, required=True, help="Degrees east.")
@click.pass_obj
def pops_add(
    obj: CliContext, pop: str, city: str, country: str, latitude: float, longitude: float
) -> None:
    """Create or change a PoP. POP is an IATA code in lower case, such as ams."""
    body = {"city": city, "country": country, "latitude": latitude, "longitude": longitude}
    show_one(obj.api.ask("PUT", f"/v1/pops/{segment(pop)}", body), obj.output)


@click.group()
def nodes() -> None:
    """Manage nodes (GPU servers)."""


NODE_COLUMNS: Final = [
    "node_id", "pop", "devices", "address", "silent_s", "draining", "revoked", "replicas", "release"
]  # fmt: skip


@nodes.command("list")
@click.pass_obj
def nodes_list(obj: CliContext) -> None:
    """List nodes."""
    rows = obj.api.list("/v1/nodes")
    if obj.output == "table":
        rows = [
            {**row, "devices": dict(Counter(device["device_class"] for device in row["devices"]))}
            for row in rows
        ]
    show_rows(rows, NODE_COLUMNS, obj.output)


@nodes.command("join-token")
@click.argument("pop")
@click.option(
    "--role",
    type=click.Choice(["agent", "router"]),
    default="agent",
    show_default=True,
    help="What may join: the agent of a node, or a router.",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=duration_s,
    metavar="DURATION",
    default="15m",
    show_default=True,
    help="When the token expires: seconds, or 15m, 1h, 30d.",
)
@click.option(
    "--name", help="Allow only this name; required to join again under a name that was used before."
)
@click.option(
    "--uses",
    "uses_max",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="How many may join with it.",
)
@click.pass_obj
def nodes_join_token(
    obj: CliContext, pop: str, role: str, ttl_s: float, name: str | None, uses_max: int
) -> None:
    """Create a token for nodes or routers to join a PoP. It cannot be shown again."""
    body = {"pop": pop, "role": role, "ttl_s": ttl_s, "name": name, "uses_max": uses_max}
    created = obj.api.ask("POST", "/v1/join-tokens", body)
    if obj.output == "json":
        show_one(created, obj.output)
    else:
        click.echo(created["token"])


nodes.add_command(
    list_command(
        "join-tokens",
        "/v1/join-tokens",
        ["token_id", "pop", "role", "name", "uses", "uses_max", "used_by", "expires_at"],
        "List join tokens. The third part of a token (ij1_..._TOKEN ID_...) is its id.",
    )
)
add_command(
    nodes, "delete-join-token", "DELETE", "/v1/join-tokens/{token_id}",
    "Delete a join token. What has joined with it stays.", "deleted {}",
)  # fmt: skip


@click.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["agent", "router"]),
    required=True,
    help="What has this name: the agent of a node, or a router.",
)
@click.option(
    "--serial", default="", help="Serial of one certificate, in hex (default: all of this name)."
)
@click.option("--reason", default="", help="A comment that `revocations` shows.")
@click.option(
    "--unknown", is_flag=True, help="Also a name or serial that the database does not know."
)
@click.pass_obj
def revoke(obj: CliContext, name: str, role: str, serial: str, reason: str, unknown: bool) -> None:
    """Revoke the certificates of a node or router.

    Its connection to the scheduler is closed at once.
    """
    body: dict[str, Any] = {"role": role, "name": name, "serial": serial, "reason": reason}
    if unknown:
        body["may_be_unknown"] = True
    show_one(obj.api.ask("POST", "/v1/revocations", body), obj.output)


_list_routers = list_command(
    "list",
    "/v1/routers",
    ["router_id", "pop", "silent_s", "generation", "revoked", "release"],
    "List routers.",
)


@click.group(invoke_without_command=True)
@click.pass_context
def routers(ctx: click.Context) -> None:
    """Manage routers; without a command, list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(_list_routers)


routers.add_command(_list_routers)
add_command(
    routers, "delete", "DELETE", "/v1/routers/{router}",
    "Delete a router that no longer runs. Its certificates are revoked.", "deleted {}",
)  # fmt: skip


revocations = list_command(
    "revocations",
    "/v1/revocations",
    ["role", "name", "serial", "at", "reason"],
    "List revoked certificates and names.",
)
pops.add_command(
    list_command(
        "list", "/v1/pops", ["pop", "city", "country", "latitude", "longitude"], "List PoPs."
    )
)
add_command(
    pops,
    "delete",
    "DELETE",
    "/v1/pops/{pop}",
    "Delete a PoP without nodes and routers.",
    "deleted {}",
)

NODE: Final = "/v1/nodes/{node}"
add_command(nodes, "show", "GET", NODE, "Show a node and its devices.")
add_command(
    nodes,
    "drain",
    "POST",
    f"{NODE}/drain",
    "Drain a node: its replicas move elsewhere.",
)
add_command(nodes, "undrain", "POST", f"{NODE}/undrain", "Allow replicas on a drained node again.")
add_command(
    nodes,
    "revoke",
    "POST",
    f"{NODE}/revoke",
    "Revoke a node permanently. It can no longer connect.",
)
add_command(
    nodes, "readmit", "POST", f"{NODE}/readmit",
    "Let a revoked node join again. Its old certificates stay revoked.",
)  # fmt: skip
add_command(
    nodes, "delete", "DELETE", NODE,
    "Delete a node without replicas, or a revoked one. Its certificates are revoked.", "deleted {}",
)  # fmt: skip
