"""The list of models as Anthropic's API returns it. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import DeploymentEntry

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 1000


def model_info(entry: DeploymentEntry) -> dict[str, Any]:
    """Return one model."""
    created_at = datetime.fromtimestamp(entry.created_at, UTC)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": created_at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": entry.context_tokens,
        "max_tokens": entry.context_tokens,
    }


def models_page(entries: Sequence[DeploymentEntry], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of chat models. `query` has `limit`, `after_id` and `before_id`.

    Raises ApiError 400.
    """
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
        "data": [model_info(entry) for entry in page],
        "has_more": max(0, end - start) > len(page),
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _limit(text: str) -> int:
    if not text:
        return LIMIT_DEFAULT
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= LIMIT_MAX):
        message = f"cannot use 'limit' {text[:20]!r}: expected 1 to {LIMIT_MAX}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="limit")
    return int(text)


def _position(names: Sequence[str], name: str, field: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        message = f"cannot use '{field}': there is no model {name[:128]!r}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param=field) from None
