"""Commands for the LoRA adapters of all tenants."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from isochrone.cli.client import AdminError, segment
from isochrone.cli.context import CliContext
from isochrone.cli.output import show_one, show_rows, stderr
from isochrone.cli.simple_commands import add_command, list_command
from isochrone.wire.peers.adapter import ADAPTER_FILES

LIST_COLUMNS: Final = [
    *("adapter_id", "tenant_id", "name", "model", "public", "state", "rank", "size_mib"),
    "nodes_total",
]
LIMIT_COLUMNS: Final = [
    *("tenant_id", "adapters", "adapters_max", "size_bytes", "file_bytes_max", "rank_max")
]


@click.group()
def adapters() -> None:
    """Manage the LoRA adapters that tenants have uploaded."""


@adapters.command("list")
@click.option("--tenant", help="Only those of this tenant.")
@click.pass_obj
def adapters_list(obj: CliContext, tenant: str | None) -> None:
    """List adapters, and how many nodes have their files."""
    query = {"tenant_id": tenant} if tenant else {}
    rows = [
        {**row, "size_mib": row["size_bytes"] / 2**20}
        for row in obj.api.list("/v1/adapters", query)
    ]
    show_rows(rows, LIST_COLUMNS, obj.output)


@adapters.command("upload")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--tenant", required=True, help="Whose adapter it is.")
@click.option(
    "--model", required=True, help="The deployment, by id or name, for whose model it was made."
)
@click.option("--name", required=True, help="How requests name it: MODEL:NAME, or `lora`.")
@click.option("--description", default="", help="A comment that `adapters show` shows.")
@click.option("--public", is_flag=True, help="Let all tenants use it.")
@click.pass_obj
def adapters_upload(
    obj: CliContext,
    folder: Path,
    tenant: str,
    model: str,
    name: str,
    description: str,
    public: bool,
) -> None:
    """Upload a tenant's adapter from a FOLDER as PEFT writes it.

    The folder has adapter_config.json and adapter_model.safetensors. If a file is refused, nothing
    of the adapter is left.
    """
    missing = [file for file in ADAPTER_FILES if not (folder / file).is_file()]
    if missing:
        raise click.UsageError(f"{folder} has no {' and no '.join(missing)}")
    body = {
        "tenant_id": tenant,
        "model": model,
        "name": name,
        "description": description,
        "public": public,
    }
    made: dict[str, Any] = obj.api.ask("POST", "/v1/adapters", body)
    path = f"/v1/adapters/{segment(made['adapter_id'])}"
    try:
        for file in ADAPTER_FILES:
            with stderr.status(f"uploading {file}"):
                made = obj.api.upload(f"{path}/files/{file}", folder / file)
    except BaseException:
        with suppress(AdminError):
            obj.api.ask("DELETE", path)
        raise
    show_one(made, obj.output)


@adapters.command("publish")
@click.argument("adapter")
@click.pass_obj
def adapters_publish(obj: CliContext, adapter: str) -> None:
    """Let all tenants use an adapter, given by its id."""
    _set_public(obj, adapter, public=True)


@adapters.command("unpublish")
@click.argument("adapter")
@click.pass_obj
def adapters_unpublish(obj: CliContext, adapter: str) -> None:
    """Let only its own tenant use an adapter, given by its id."""
    _set_public(obj, adapter, public=False)


def _set_public(obj: CliContext, adapter: str, *, public: bool) -> None:
    path = f"/v1/adapters/{segment(adapter)}/public"
    show_one(obj.api.ask("PUT", path, {"public": public}), obj.output)


add_command(
    adapters, "show", "GET", "/v1/adapters/{adapter}",
    "Show an adapter and the nodes that have its files. ADAPTER is its id.",
)  # fmt: skip
add_command(
    adapters, "delete", "DELETE", "/v1/adapters/{adapter}",
    "Delete an adapter, given by its id. Requests that name it then get a 404.", "deleted {}",
)  # fmt: skip
adapters.add_command(
    list_command(
        "limits",
        "/v1/adapter-tenants",
        LIMIT_COLUMNS,
        "List the tenants that have adapters, with their limits. These are `[adapters]` of the"
        " schedulers' settings.",
    )
)
