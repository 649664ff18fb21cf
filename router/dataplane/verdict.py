"""What a node's answer is worth: passed on, or tried elsewhere."""

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from router.dataplane.exchange import AttemptFailed, Failure, Head
from router.dataplane.usage import NoAnswer, UsageCount, read_whole


def hold_to_status(node_id: str, head: Head) -> None:
    """Tell an answer that is the client's own affair from one that another replica may better."""
    if head.refused == headers.CANNOT_RESUME:
        raise AttemptFailed(Failure.UNFIT, f"{node_id} cannot go on from a text")
    if head.refused:
        raise AttemptFailed(Failure.REFUSED, f"{node_id} refused: {head.refused}", head.refused)
    if head.status >= 500:
        raise AttemptFailed(Failure.ERROR, f"{node_id} answered {head.status}")
    if head.status < 200 or 200 < head.status < 400:
        raise AttemptFailed(Failure.BROKEN, f"{node_id} answered {head.status}")


def read_answer(node_id: str, body: bytes) -> tuple[UsageCount | None, bytes]:
    """Read a whole answer's usage; what is no JSON object is no answer."""
    try:
        return read_whole(body)
    except NoAnswer:
        raise AttemptFailed(Failure.BROKEN, f"{node_id} sent no JSON object") from None


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
