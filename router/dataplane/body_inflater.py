"""Inflates a compressed request body in slices, so that other requests run in between."""

import zlib
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from router.dataplane import http1

INPUT_SLICE_BYTES: Final = 64 * 1024
OUTPUT_SLICE_BYTES: Final = 64 * 1024
"""The most that one step inflates: a fraction of a millisecond."""


class BodyInflater:
    """Inflates one body. Call `step` until it returns True, then take `inflated`."""

    def __init__(self, body: bytes, encoding: bytes, bytes_max: int) -> None:
        """Inflate a body of `encoding` gzip or deflate to at most `bytes_max` bytes."""
        self._body = body
        self._encoding = encoding.decode()
        self._bytes_max = bytes_max
        self._inflater = zlib.decompressobj(wbits=31 if encoding == b"gzip" else 15)
        self._read_bytes = 0
        self._slices: list[bytes] = []
        self.inflated_bytes = 0

    def step(self) -> bool:
        """Inflate one slice; return whether the body is complete. Raises ApiError 400 or 413."""
        inflater = self._inflater
        source = inflater.unconsumed_tail
        if not source:
            source = self._body[self._read_bytes : self._read_bytes + INPUT_SLICE_BYTES]
            self._read_bytes += len(source)
        try:
            output = inflater.decompress(source, OUTPUT_SLICE_BYTES)
        except zlib.error:
            raise http1.malformed(f"the body is not valid {self._encoding}") from None
        self.inflated_bytes += len(output)
        if self.inflated_bytes > self._bytes_max:
            raise ApiError(
                ErrorCode.TOO_LARGE,
                f"cannot read the body: its {len(self._body)} bytes of {self._encoding} inflate to"
                f" more than the allowed {self._bytes_max}; send it smaller or uncompressed",
            )
        self._slices.append(output)
        is_read = self._read_bytes >= len(self._body)
        if inflater.eof:
            if inflater.unused_data or not is_read:
                raise self._cut_short()
            return True
        if is_read and not output and not inflater.unconsumed_tail:
            raise self._cut_short()
        return False

    def inflated(self) -> bytes:
        """Return the inflated body."""
        return b"".join(self._slices)

    def _cut_short(self) -> ApiError:
        return http1.malformed(f"the {self._encoding} body is cut short")
