"""The admin API's part on usage: what keys and tenants used."""

from datetime import date, timedelta
from typing import Final

import msgspec

from isochrone.wire.admin import UsageView
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.store import keys
from scheduler.store.usage_sums import (
    TooMuchUsage,
    UsageCursor,
    UsageQuery,
    read_today,
    sum_usage,
)

DAYS_DEFAULT: Final = 7
DAYS_MAX: Final = 31


async def list_usage(call: AdminRequest) -> Page:
    """What keys or tenants used of each deployment, by day or in total."""
    asked = await _asked(call)
    try:
        rows = await sum_usage(call.connection, asked, _after(call, asked), call.limit + 1)
    except TooMuchUsage as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error

    def name(row: UsageView) -> str:
        day = date.fromisoformat(row.day) if row.day else asked.first
        place = UsageCursor(day, row.tenant_id, row.key_id, row.deployment_id)
        return msgspec.json.encode(place).decode()

    return call.page(rows, name)


async def _asked(call: AdminRequest) -> UsageQuery:
    last = _day(call, "to") or await read_today(call.connection)
    first = _day(call, "from") or last - timedelta(days=DAYS_DEFAULT - 1)
    if not 0 <= (last - first).days < DAYS_MAX:
        raise _wrong("from", f"{first} to {last} is not 1 to {DAYS_MAX} days")
    tenant_id, key_id = call.query("tenant_id") or "", call.query("key_id") or ""
    if key_id:
        key = require_found(await keys.get_key(call.connection, key_id), "key", key_id)
        if tenant_id not in ("", key.tenant_id):
            raise _wrong("tenant_id", f"the key {key_id} is of the tenant {key.tenant_id}")
        tenant_id = key.tenant_id
    return UsageQuery(
        first,
        last,
        tenant_id,
        key_id,
        is_by_key=_one_of(call, "by", "key", "tenant") == "key",
        is_per_day=_one_of(call, "per", "total", "day") == "day",
    )


def _after(call: AdminRequest, asked: UsageQuery) -> UsageCursor:
    if not call.after:
        return UsageCursor(asked.first)
    try:
        return msgspec.json.decode(call.after, type=UsageCursor)
    except msgspec.DecodeError:
        raise _wrong("cursor", "the cursor is not one that this list gave") from None


def _day(call: AdminRequest, name: str) -> date | None:
    text = call.query(name)
    if not text:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise _wrong(name, f"{text[:20]!r} is not a day; write it as 2026-01-31") from None
    if not 2000 <= day.year < 3000:
        raise _wrong(name, f"{day} is not a day of this time")
    return day


def _one_of(call: AdminRequest, name: str, first: str, second: str) -> str:
    text = call.query(name) or first
    if text not in (first, second):
        raise _wrong(name, f"{name} is {text[:20]!r}, give {first} or {second}")
    return text


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot tell usage: {why}", param=param)


USAGE_ENDPOINTS: Final = (
    Endpoint(
        "GET", "/v1/usage", list_usage, "What keys or tenants used", UsageView, is_list=True,
        query=("tenant_id", "key_id", "from", "to", "by", "per"),
    ),
)  # fmt: skip
