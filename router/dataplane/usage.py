"""The usage that an engine tells: read from a whole answer or a frame, completed, rewritten."""

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


_wholes: Final = msgspec.json.Decoder(_Whole)


class NoAnswer(ValueError):
    """The body is no JSON object of an answer."""


def read_whole(body: bytes) -> tuple[UsageCount | None, bytes]:
    """Return the usage of a whole answer, and the answer with `cached_tokens` in it.

    Only the usage is decoded; an engine that tells of cached tokens has its bytes passed on.
    """
    try:
        usage = _wholes.decode(body).usage
    except msgspec.ValidationError:
        return _read_odd(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise NoAnswer from error
    if usage is None:
        return None, body
    details = usage.prompt_tokens_details
    if details is None or details.cached_tokens is None:
        return _read_odd(body)
    return UsageCount(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens), body


def _read_odd(body: bytes) -> tuple[UsageCount | None, bytes]:
    """Read an answer that lacks `cached_tokens`, or tells its usage in a form of its own."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise NoAnswer from error
    if not isinstance(decoded, dict):
        raise NoAnswer
    if with_cached_tokens(decoded):
        body = msgspec.json.encode(decoded)
    return usage_of(decoded), body


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
