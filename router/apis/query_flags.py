"""Flags in the query of a request."""

from urllib.parse import parse_qs

from isochrone.wire.errors import ApiError, ErrorCode


def flag(query: str, name: str) -> bool:
    """Return whether a query has a parameter that is true. Raises ApiError 400."""
    if name not in query:
        return False
    value = parse_qs(query, keep_blank_values=True).get(name, ["false"])[-1]
    if value.lower() not in ("true", "false"):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use '{name}': expected true or false, got {value[:20]!r}",
            param=name,
        )
    return value.lower() == "true"
