"""The admin API of tenants' budgets above the limits of their keys."""

import re
from functools import partial
from typing import Final

from isochrone.wire.admin import DeletedTenantView, LimitsBody, TenantBudgetView
from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NAME_PATTERN, TenantId
from scheduler.api.admin.endpoint import (
    AdminRequest,
    Endpoint,
    list_endpoint,
    not_found,
    read_endpoint,
    require_found,
)
from scheduler.store.accounts import tenant_budgets
from scheduler.store.accounts.keys import revoke_all
from scheduler.store.accounts.tenants import first_tenants, had_key, has_tenant
from scheduler.store.client_objects.adapters import delete_adapters
from scheduler.store.client_objects.tenant_objects import delete_objects

_NAME: Final = re.compile(NAME_PATTERN)

TENANTS_SHOWN: Final = 10
"""The names of tenants in the message that refuses another."""


async def require_tenant(
    request: AdminRequest, tenant_id: str, action: str, hint: str = ""
) -> None:
    """Raise ApiError 400 if there is no such tenant, with a few that there are."""
    if await has_tenant(request.connection, tenant_id):
        return
    names = await first_tenants(request.connection, TENANTS_SHOWN + 1)
    shown = ", ".join(names[:TENANTS_SHOWN]) + (", ..." if len(names) > TENANTS_SHOWN else "")
    raise ApiError(
        ErrorCode.INVALID_REQUEST,
        f"{action} tenant {tenant_id[:60]!r}: it has neither a key nor a budget; use one of"
        f" {shown or 'none: create a key first'} (`isochrone keys list` shows all){hint}",
        param="tenant_id",
    )


async def put_budget(request: AdminRequest) -> TenantBudgetView:
    """Create or replace a tenant's budget. Routers apply it with the next route table.

    A tenant without a key is most likely mistyped, so that the budget would limit nothing.
    `new=true` limits a tenant before its first key exists.
    """
    limits: LimitsBody = request.body
    tenant_id = TenantId(request.name)
    if not _NAME.match(tenant_id):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot limit tenant {tenant_id[:60]!r}: names are as those of `keys create`",
        )
    if request.query("new") not in (None, "true", "false"):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "cannot limit: new is `true` or `false`", param="new"
        )
    if request.query("new") != "true":
        hint = ", or limit it before its first key with `--new`, `new=true`"
        await require_tenant(request, tenant_id, "cannot limit", hint)
    before = await tenant_budgets.get_budget(request.connection, tenant_id)
    after = await tenant_budgets.put_budget(request.connection, tenant_id, limits, request.etag)
    await request.record("tenant.limit", tenant_id, before=before, after=after)
    return after


async def delete_budget(request: AdminRequest) -> None:
    """End a tenant's budget: only the limits of its keys remain."""
    found = await tenant_budgets.get_budget(request.connection, request.name)
    before = require_found(found, "budget of tenant", request.name)
    await tenant_budgets.delete_budget(request.connection, before.tenant_id, request.etag)
    request.changed_keys.append(budget_id(before.tenant_id))
    await request.record("tenant.unlimit", before.tenant_id, before=before)


async def delete_tenant_data(request: AdminRequest) -> DeletedTenantView:
    """Revoke all keys of a tenant, end its budget, and delete all that the store has of it.

    The contents of its files follow within seconds (`loops/advance_batches.py`). Usage stays, with
    counts only, because it is billed.
    """
    connection, tenant_id = request.connection, TenantId(request.name)
    if not await had_key(connection, tenant_id):
        raise not_found("tenant", tenant_id)
    request.changed_keys += await revoke_all(connection, tenant_id)
    for key_id in request.changed_keys:
        # If this scheduler stands by, the acting one finds changed keys by their events.
        if key_id != budget_id(tenant_id):
            await request.record("key.revoke", key_id)
    counts = await delete_objects(connection, tenant_id)
    adapters = await delete_adapters(connection, tenant_id)
    if request.context.adapters is not None:
        for adapter in adapters:
            request.on_commit.append(partial(request.context.adapters.delete_files, adapter.files))
    after = DeletedTenantView(
        tenant_id=tenant_id,
        keys=len(request.changed_keys),
        adapters=len(adapters),
        **counts._asdict(),
    )
    await request.record("tenant.delete", tenant_id, after=after)
    return after


TENANT_ENDPOINTS: Final = (
    Endpoint(
        *("GET", "/v1/tenants", list_endpoint(tenant_budgets.list_budgets, "tenant_id")),
        "List tenants with a budget",
        TenantBudgetView,
        is_list=True,
    ),
    Endpoint(
        *("GET", "/v1/tenants/{tenant_id}"),
        read_endpoint(tenant_budgets.get_budget, "budget of tenant"),
        "Read a tenant's budget",
        TenantBudgetView,
    ),
    Endpoint(
        *("PUT", "/v1/tenants/{tenant_id}/limits", put_budget),
        "Create or replace a tenant's budget",
        TenantBudgetView,
        LimitsBody,
        query=("new",),
        changes_key=True,
    ),
    Endpoint(
        *("DELETE", "/v1/tenants/{tenant_id}", delete_budget),
        "End a tenant's budget",
        status=204,
        changes_key=True,
    ),
    Endpoint(
        *("DELETE", "/v1/tenants/{tenant_id}/data", delete_tenant_data),
        "Revoke a tenant's keys and delete its data",
        DeletedTenantView,
    ),
)
