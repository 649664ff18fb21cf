"""The usage that an engine tells: of an answer or a frame, read, completed, rewritten."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta


class UsageCount(msgspec.Struct, frozen=True):
    """What an engine says that a request used."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


_Count = Annotated[int, Meta(ge=0, lt=2**53)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


WHOLE: Final = msgspec.json.Decoder(_Whole)
"""Reads of a whole answer its usage alone."""


def usage_of(body: dict[str, Any]) -> UsageCount | None:
    """Read the usage of an answer or a frame, where it has one."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return UsageCount(
        _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached)
    )


def with_cached_tokens(body: dict[str, Any]) -> bool:
    """Add `usage.prompt_tokens_details.cached_tokens` where it is missing; True if it was."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        return False
    usage["prompt_tokens_details"] = {
        **(details if isinstance(details, dict) else {}),
        "cached_tokens": 0,
    }
    return True


def set_usage(body: dict[str, Any], usage: UsageCount) -> None:
    """Put `usage` in the place of what the body tells."""
    body["usage"] = {
        **body["usage"],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
