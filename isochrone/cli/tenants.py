"""Commands for tenants: their budgets above the limits of their keys, and their end."""

import click

from isochrone.cli.access import given_limits, limit_options, note_free_models, with_set_limits
from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.output import show_one, show_rows
from isochrone.cli.simple_commands import add_command


@click.group()
def tenants() -> None:
    """Manage the budgets of tenants, and delete tenants.

    A budget holds for all keys of a tenant together, above the limits of each.
    """


@tenants.command("limit")
@click.argument("tenant")
@click.option("--new", "is_new", is_flag=True, help="The tenant may have no key yet.")
@limit_options
@click.pass_obj
def tenants_limit(obj: CliContext, /, tenant: str, *, is_new: bool, **limits: float | None) -> None:
    """Set limits of a tenant, for all of its keys together.

    Limits that are not given stay the same; 0 removes a limit. A tenant without a key is refused,
    unless `--new` says that its first one follows.
    """
    if not given_limits(limits):
        raise click.UsageError("give at least one limit")
    found = [row for row in obj.api.list("/v1/tenants") if row["tenant_id"] == tenant]
    before = found[0]["limits"] if found else {}
    etag = found[0]["etag"] if found else None
    path = f"/v1/tenants/{segment(tenant)}/limits"
    body, query = {**before, **given_limits(limits)}, {"new": "true"} if is_new else None
    row = obj.api.ask("PUT", path, body, query=query, etag=etag)
    show_one(row if obj.output == "json" else with_set_limits(row), obj.output)
    note_free_models(obj, limits)


@tenants.command("list")
@click.pass_obj
def tenants_list(obj: CliContext) -> None:
    """List tenants with a budget, and what they have used of it."""
    rows = obj.api.list("/v1/tenants")
    if obj.output == "table":
        rows = [with_set_limits(row) for row in rows]
    columns = ["tenant_id", "tokens_today", "spend_today", "tokens_this_month", "spend_this_month"]
    show_rows(rows, [*columns, "limits"], obj.output)


add_command(
    tenants, "unlimit", "DELETE", "/v1/tenants/{tenant}",
    "End a tenant's budget; the limits of its keys remain.", "ended the budget of {}",
)  # fmt: skip
add_command(
    tenants, "delete", "DELETE", "/v1/tenants/{tenant}/data",
    "Revoke all keys of a tenant, and delete its data. That is its budget, files, batches,"
    " responses, conversations and adapters. Usage is kept.",
)  # fmt: skip
