"""What a node's answer is worth: passed on, or tried elsewhere."""

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from router.dataplane.exchange import AttemptFailed, FailureCause, ResponseHead
from router.dataplane.usage import WHOLE, UsageCount, usage_of, with_cached_tokens


def hold_to_status(node_id: str, head: ResponseHead) -> None:
    """Tell an answer that is the client's own affair from one that another replica may better."""
    if head.refused == headers.CANNOT_RESUME:
        raise AttemptFailed(FailureCause.UNFIT, f"{node_id} cannot go on from a text")
    if head.refused:
        raise AttemptFailed(
            FailureCause.REFUSED, f"{node_id} refused: {head.refused}", head.refused
        )
    if head.status >= 500:
        raise AttemptFailed(FailureCause.ERROR, f"{node_id} answered {head.status}")
    if head.status < 200 or 200 < head.status < 400:
        raise AttemptFailed(FailureCause.BROKEN, f"{node_id} answered {head.status}")


def read_answer(node_id: str, body: bytes) -> tuple[UsageCount | None, bytes]:
    """Return a whole answer's usage, and the answer with `cached_tokens` in it.

    Only the usage is decoded; an engine that tells of cached tokens has its bytes passed on.
    """
    try:
        usage = WHOLE.decode(body).usage
    except msgspec.ValidationError:
        return _read_odd(node_id, body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise _no_object(node_id) from None
    if usage is None:
        return None, body
    details = usage.prompt_tokens_details
    if details is None or details.cached_tokens is None:
        return _read_odd(node_id, body)
    return UsageCount(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens), body


def _read_odd(node_id: str, body: bytes) -> tuple[UsageCount | None, bytes]:
    """Read an answer that lacks `cached_tokens`, or tells its usage in a form of its own."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise _no_object(node_id) from None
    if not isinstance(decoded, dict):
        raise _no_object(node_id)
    if with_cached_tokens(decoded):
        body = msgspec.json.encode(decoded)
    return usage_of(decoded), body


def _no_object(node_id: str) -> AttemptFailed:
    return AttemptFailed(FailureCause.BROKEN, f"{node_id} sent no JSON object")


def hold_to_error(body: bytes, status: int) -> None:
    """Raise ApiError where a refusal of the request is in no shape that a client could read."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        decoded = None
    if not isinstance(decoded, dict) or "error" not in decoded:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot answer: the replica refused the request with status {status}",
        )
