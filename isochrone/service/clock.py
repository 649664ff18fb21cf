"""The wall clock, for what must agree with other machines: certificates and retention."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
