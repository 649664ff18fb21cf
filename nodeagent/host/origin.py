"""Weights from where the catalogue says that they are, asked where no peer can give them.

An origin is held to a pace as peers are: one that sends next to nothing is let go, and the next
attempt goes on from the byte where this one stopped.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from isochrone.wire.model import ArtifactFile
from nodeagent.decide.bandwidth import Watermark
from nodeagent.host.peers import Wanted
from nodeagent.host.sources import SourceError, Sources

ATTEMPTS_MAX: Final = 5


class OriginLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much patience an origin gets: less than a peer's pace will do, for there is no other."""

    least_bytes_per_s: float = 64 * 1024
    window_s: float = 30.0


class OriginCut(Exception):
    """The origin broke off, or was let go; what came is kept, and may be gone on from."""


class Origin:
    """Reads files from their sources."""

    def __init__(
        self, sources: Sources, clock: Callable[[], float], limits: OriginLimits | None = None
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._limits = limits or OriginLimits()

    async def fetch(self, source: str, wanted: Wanted) -> None:
        """Read from where we are to the end; raises OriginCut, or SourceError for good."""
        offset = _size_of(wanted.path, wanted.file)
        if offset == wanted.file.size_bytes:
            return
        began = self._clock()
        try:
            size = await self._read(source, wanted, offset)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OriginCut(str(error) or type(error).__name__) from error
        if size < wanted.file.size_bytes:
            raise OriginCut(f"it ended after {size} of {wanted.file.size_bytes} bytes")
        wanted.link.saw(size - offset, self._clock() - began)

    async def _read(self, source: str, wanted: Wanted, offset: int) -> int:
        """Append what comes; return how much is there."""
        _, file, path, _, tell, link = wanted
        limits = self._limits
        async with self._sources.open(source, file.path, offset) as (resumed, chunks):
            watermark = Watermark(limits.least_bytes_per_s, limits.window_s, self._clock())
            size = offset if resumed else 0
            with path.open("ab" if resumed else "wb") as out:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > file.size_bytes:
                        path.unlink()
                        raise SourceError(
                            f"cannot take {file.path}: the origin sends more than the "
                            f"{file.size_bytes} bytes of its manifest"
                        )
                    await asyncio.to_thread(out.write, chunk)
                    tell(size)
                    excused_s = await link.keep_pace(len(chunk))
                    if watermark.is_slow(len(chunk), self._clock(), excused_s):
                        raise OriginCut(
                            f"it sends less than {limits.least_bytes_per_s:g} bytes a second"
                        )
        return size


def _size_of(path: Path, file: ArtifactFile) -> int:
    """Return how much of the file is here; what is longer than the file is dropped."""
    size = path.stat().st_size if path.exists() else 0
    if size > file.size_bytes:
        path.unlink()
        return 0
    return size
