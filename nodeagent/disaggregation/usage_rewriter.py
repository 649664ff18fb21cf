"""Sets `cached_tokens` in the answer of a decode leg to that of its prefill leg.

The decode engine finds the whole prompt in its cache, because another engine has just computed it.
The client's usage and price must count the tokens that the prefill engine had cached. After a
prefill leg that failed, the blocks that had arrived by then are no cached ones either.
"""

from typing import Any, Final

import msgspec

_USAGE: Final = b'"usage"'
_DATA: Final = b"data:"
LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A longer line is passed on unchanged: no engine writes one."""


def rewrite_json(body: bytes, cached_tokens: int, *, is_most: bool = False) -> bytes:
    """Return a JSON answer with the prefill leg's `cached_tokens`; unchanged without a usage.

    With `is_most` the answer's own number is kept if that is lower.
    """
    if _USAGE not in body:
        return body
    try:
        decoded = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(decoded, dict) or not _set_cached_tokens(decoded, cached_tokens, is_most):
        return body
    return msgspec.json.encode(decoded)


class UsageRewriter:
    """Rewrites an event stream, whose chunks may end anywhere. Only lines with a usage change."""

    def __init__(self, cached_tokens: int, *, is_most: bool = False) -> None:
        """With `is_most` lower numbers are kept."""
        self._cached_tokens = cached_tokens
        self._is_most = is_most
        self._line = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the complete lines."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._line += data
            if len(self._line) <= LINE_BYTES_MAX:
                return b""
            return self._take_line()
        whole = bytes(self._line) + data[:end]
        self._line = bytearray(data[end:])
        if _USAGE not in whole:
            return whole
        return b"".join(map(self._rewrite, whole.splitlines(keepends=True)))

    def flush(self) -> bytes:
        """Return the last line, which has no end."""
        return self._rewrite(self._take_line())

    def _take_line(self) -> bytes:
        line, self._line = bytes(self._line), bytearray()
        return line

    def _rewrite(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or _USAGE not in line:
            return line
        data = line[len(_DATA) :]
        text = data.strip()
        rewritten = rewrite_json(text, self._cached_tokens, is_most=self._is_most)
        return line if rewritten is text else line.replace(text, rewritten, 1)


def _set_cached_tokens(answer: dict[str, Any], cached_tokens: int, is_most: bool) -> bool:
    """Set the field, and make its parents if they are missing; False if nothing is to change."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details")
    if is_most:
        own = details.get("cached_tokens") if isinstance(details, dict) else None
        if not isinstance(own, int) or own <= cached_tokens:
            return False
    if not isinstance(details, dict):
        details = usage["prompt_tokens_details"] = {}
    prompt_tokens = usage.get("prompt_tokens")
    most = prompt_tokens if isinstance(prompt_tokens, int) else cached_tokens
    details["cached_tokens"] = min(cached_tokens, most)
    return True
