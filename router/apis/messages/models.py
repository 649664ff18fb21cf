"""The list of models as Anthropic's API returns it. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs

from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import DeploymentEntry

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 1000
LIFECYCLES: Final = ("active", "deprecated", "retired")
LIFECYCLES_DEFAULT: Final = ("active", "deprecated")
PARAMETERS: Final = ("after_id", "before_id", "lifecycle", "lifecycle[]", "limit", "beta")
"""Anthropic's clients send `beta=true`."""


def model_info(entry: DeploymentEntry, now_unix_s: float) -> dict[str, Any]:
    """Return one model."""
    deprecation = entry.deprecation
    retires_at = deprecation.sunset_at if deprecation is not None else 0
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": _rfc3339(entry.created_at),
        "lifecycle": _lifecycle(entry, now_unix_s),
        "deprecated_at": _rfc3339(deprecation.announced_at) if deprecation is not None else None,
        "retires_at": _rfc3339(retires_at) if retires_at else None,
        "max_input_tokens": entry.context_tokens,
        "max_tokens": entry.context_tokens,
    }


def models_page(
    chats: Sequence[DeploymentEntry],
    query_string: str,
    now_unix_s: float,
) -> dict[str, Any]:
    """Return a page of chat models.

    The query has `limit`, `after_id`, `before_id` and `lifecycle`, a list that SDKs send with
    brackets. Raises ApiError 400.
    """
    parameters = parse_qs(query_string, keep_blank_values=True)
    query = {name: values[0] for name, values in parameters.items()}
    if unknown := query.keys() - PARAMETERS:
        name = min(unknown)[:80]
        message = f"cannot use the query parameter {name!r}: this path has {', '.join(PARAMETERS)}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param=name)
    lifecycles = [*parameters.get("lifecycle", ()), *parameters.get("lifecycle[]", ())]
    for lifecycle in lifecycles:
        if lifecycle not in LIFECYCLES:
            message = f"cannot use 'lifecycle' {lifecycle[:20]!r}: use {', '.join(LIFECYCLES)}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message, param="lifecycle")
    wanted = lifecycles or LIFECYCLES_DEFAULT
    entries = [entry for entry in chats if _lifecycle(entry, now_unix_s) in wanted]
    limit = _limit(query.get("limit", ""))
    names = [entry.name for entry in entries]
    start, end = 0, len(names)
    if "after_id" in query:
        start = _position(names, query["after_id"], "after_id") + 1
    if "before_id" in query:
        end = _position(names, query["before_id"], "before_id")
    is_backward = "before_id" in query and "after_id" not in query
    page = entries[max(start, end - limit) : end] if is_backward else entries[start:end][:limit]
    return {
        "data": [model_info(entry, now_unix_s) for entry in page],
        "has_more": max(0, end - start) > len(page),
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _lifecycle(entry: DeploymentEntry, now_unix_s: float) -> str:
    if entry.deprecation is None:
        return "active"
    is_retired = 0 < entry.deprecation.sunset_at <= now_unix_s
    return "retired" if is_retired else "deprecated"


def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _limit(text: str) -> int:
    if not text:
        return LIMIT_DEFAULT
    limit = parse_digits(text)
    if limit is None or not 1 <= limit <= LIMIT_MAX:
        message = f"cannot use 'limit' {text[:20]!r}: expected 1 to {LIMIT_MAX}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="limit")
    return limit


def _position(names: Sequence[str], name: str, field: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        message = f"cannot use '{field}': there is no model {name[:128]!r}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param=field) from None
