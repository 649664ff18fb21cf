"""The token usage that an engine reports, in a response or a stream frame: read and rewritten."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from router.dataplane.usage_count import UsageCount as UsageCount

_Count = Annotated[int, Meta(ge=0, lt=2**53)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _EngineUsage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _ResponseWithUsage(msgspec.Struct):
    usage: _EngineUsage | None = None


RESPONSE_USAGE: Final = msgspec.json.Decoder(_ResponseWithUsage)
"""Decodes only the usage of a complete response."""


def usage_of(body: dict[str, Any]) -> UsageCount | None:
    """Return the usage of a decoded response or frame, or None; invalid counts become 0."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return UsageCount(
        _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached)
    )


def reasoning_tokens_of(usage: dict[str, Any]) -> int | None:
    """Return the output tokens that were reasoning, None if the engine does not say.

    SGLang has the number beside the other counts.
    """
    details = usage.get("completion_tokens_details") or {}
    counts = [one.get("reasoning_tokens") for one in (details, usage)]
    return max([count for count in counts if isinstance(count, int)], default=None)


def add_cached_tokens(body: dict[str, Any]) -> bool:
    """Add `usage.prompt_tokens_details.cached_tokens` if it is missing; return whether it was."""
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
    """Replace the counts in a body's usage."""
    body["usage"] = {
        **body["usage"],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
