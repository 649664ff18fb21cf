"""Errors in OpenAI's shape."""

import math

import msgspec

from isochrone.wire.errors import ApiError, openai_error
from router.dataplane.http1 import lines_of
from router.dataplane.message import Reply


def error_reply(error: ApiError) -> Reply:
    """Return the whole error answer."""
    lines = lines_of(error.headers)
    if error.retry_after_s is not None:
        lines += f"retry-after: {max(1, math.ceil(error.retry_after_s))}\r\n"
    return Reply(error.meaning.status, msgspec.json.encode(openai_error(error)), lines)
