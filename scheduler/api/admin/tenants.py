"""The admin API of tenants' budgets above the limits of their keys."""

import re
from typing import Final

from isochrone.wire.admin import LimitsBody, TenantBudgetView
from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NAME_PATTERN, TenantId
from scheduler.api.admin.endpoint import (
    AdminRequest,
    Endpoint,
    list_endpoint,
    read_endpoint,
    require_found,
)
from scheduler.store.accounts import tenant_budgets

_NAME: Final = re.compile(NAME_PATTERN)


async def put_budget(request: AdminRequest) -> TenantBudgetView:
    """Create or replace a tenant's budget. Routers apply it with the next route table."""
    limits: LimitsBody = request.body
    tenant_id = TenantId(request.name)
    if not _NAME.match(tenant_id):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot limit tenant {tenant_id[:60]!r}: names are as those of `keys create`",
        )
    before = await tenant_budgets.get_budget(request.connection, tenant_id)
    after = await tenant_budgets.put_budget(request.connection, tenant_id, limits, request.etag)
    await request.record("tenant.limit", tenant_id, before=before, after=after)
    return after


async def delete_budget(request: AdminRequest) -> None:
    """End a tenant's budget: only the limits of its keys remain."""
    found = await tenant_budgets.get_budget(request.connection, request.name)
    before = require_found(found, "budget of tenant", request.name)
    await tenant_budgets.delete_budget(request.connection, before.tenant_id, request.etag)
    request.changed_key = budget_id(before.tenant_id)
    await request.record("tenant.unlimit", before.tenant_id, before=before)


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
        changes_key=True,
    ),
    Endpoint(
        *("DELETE", "/v1/tenants/{tenant_id}", delete_budget),
        "End a tenant's budget",
        status=204,
        changes_key=True,
    ),
)
