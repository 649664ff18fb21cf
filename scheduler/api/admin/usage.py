"""The admin API of usage by API key or tenant."""

from datetime import date, timedelta
from typing import Final

import msgspec

from isochrone.wire.admin import UsageView
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.admin.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.store.accounts import keys
from scheduler.store.accounts.tenants import had_key
from scheduler.store.accounts.usage_sums import (
    TooMuchUsage,
    UsageCursor,
    UsageQuery,
    read_today,
    sum_usage,
)

DAYS_DEFAULT: Final = 7
DAYS_MAX: Final = 31


async def list_usage(request: AdminRequest) -> Page:
    """List the usage of each deployment by key or tenant, by day or in total."""
    query = await _parse_query(request)
    after = _parse_cursor(request, query)
    try:
        rows = await sum_usage(request.connection, query, after, request.limit + 1)
    except TooMuchUsage as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
    if query.tenant_id and not rows and not request.after:
        await _require_tenant(request, query.tenant_id)

    def row_id(row: UsageView) -> str:
        day = date.fromisoformat(row.day) if row.day else query.first
        cursor = UsageCursor(day, row.tenant_id, row.key_id, row.deployment_id)
        return msgspec.json.encode(cursor).decode()

    return request.page(rows, row_id)


async def _require_tenant(request: AdminRequest, tenant_id: str) -> None:
    """Raise ApiError 404 if the tenant never had a key: else a wrong name would look unused."""
    if not await had_key(request.connection, tenant_id):
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot list usage: tenant {tenant_id[:60]!r} has no usage in these days, and never"
            " had a key or a budget",
            param="tenant_id",
        )


async def _parse_query(request: AdminRequest) -> UsageQuery:
    last = _day(request, "to") or await read_today(request.connection)
    first = _day(request, "from") or last - timedelta(days=DAYS_DEFAULT - 1)
    if not 0 <= (last - first).days < DAYS_MAX:
        raise _invalid("from", f"{first} to {last} is not 1 to {DAYS_MAX} days")
    tenant_id, key_id = request.query("tenant_id") or "", request.query("key_id") or ""
    if key_id:
        key = require_found(await keys.get_key(request.connection, key_id), "key", key_id)
        if tenant_id not in ("", key.tenant_id):
            raise _invalid("tenant_id", f"the key {key_id} belongs to the tenant {key.tenant_id}")
        tenant_id = key.tenant_id
    return UsageQuery(
        first,
        last,
        tenant_id,
        key_id,
        is_by_key=_choice(request, "by", "key", "tenant") == "key",
        is_per_day=_choice(request, "per", "total", "day") == "day",
    )


def _parse_cursor(request: AdminRequest, query: UsageQuery) -> UsageCursor:
    if not request.after:
        return UsageCursor(query.first)
    try:
        return msgspec.json.decode(request.after, type=UsageCursor)
    except msgspec.DecodeError:
        raise _invalid("cursor", "the cursor was not returned by this list") from None


def _day(request: AdminRequest, name: str) -> date | None:
    text = request.query(name)
    if text is None:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise _invalid(name, f"{text[:20]!r} is not a day; write it as 2026-01-31") from None
    if not 2000 <= day.year < 3000:
        raise _invalid(name, f"{day} is not between 2000 and 2999")
    return day


def _choice(request: AdminRequest, name: str, default: str, other: str) -> str:
    text = request.query(name)
    text = default if text is None else text
    if text not in (default, other):
        raise _invalid(name, f"{name} is {text[:20]!r}, give {default} or {other}")
    return text


def _invalid(param: str, reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot list usage: {reason}", param=param)


USAGE_ENDPOINTS: Final = (
    Endpoint(
        "GET", "/v1/usage", list_usage, "List usage by key or tenant", UsageView, is_list=True,
        query=("tenant_id", "key_id", "from", "to", "by", "per"),
    ),
)  # fmt: skip
