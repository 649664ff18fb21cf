"""Fetches artifacts ahead of their use, one at a time, in the order of the assignment.

A starting replica goes first: while one waits for its artifact, the prefetch is suspended. Later
the prefetch resumes from the bytes that were fetched.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, NamedTuple

from isochrone.wire.peers.assignment import ArtifactPrefetch
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 0.5


class PrefetchCounts(NamedTuple):
    """The counts of one turn; `is_suspended` if a start went first or a prefetch was withdrawn."""

    fetched: int = 0
    failed: int = 0
    is_suspended: bool = False


@dataclass(eq=False)
class PrefetchJob:
    """Fetches the artifacts that the assignment lists. A failed one does not stop the others."""

    node: NodeState
    supervisor: Supervisor
    artifacts: ArtifactStore

    async def run_once(self) -> PrefetchCounts:
        """Fetch every listed artifact that is missing. A turn takes as long as the transfers do."""
        fetched = failed = 0
        for prefetch in self.node.prefetches():
            if prefetch.artifact.digest in await asyncio.to_thread(self.artifacts.digests):
                continue
            if not self._may_continue(prefetch):
                return PrefetchCounts(fetched, failed, is_suspended=True)
            try:
                if not await self._fetch(prefetch):
                    return PrefetchCounts(fetched, failed, is_suspended=True)
            except ArtifactError as error:
                failed += 1
                log.warning("prefetch failed", extra={"fields": {"reason": str(error)}})
            else:
                fetched += 1
                self.node.nudge_report()
        return PrefetchCounts(fetched, failed)

    async def _fetch(self, prefetch: ArtifactPrefetch) -> bool:
        """Fetch one artifact; return False if it was suspended. Raises ArtifactError."""

        def pinned() -> set[str]:
            listed = {prefetch.artifact.digest for prefetch in self.node.prefetches()}
            return listed | set(self.supervisor.pinned())

        fetch = asyncio.create_task(
            self.artifacts.ensure(
                prefetch.artifact,
                pinned,
                lambda _: None,
                bytes_per_s=prefetch.bytes_per_s,
            )
        )
        try:
            while not fetch.done() and self._may_continue(prefetch):
                await asyncio.wait((fetch,), timeout=CHECK_INTERVAL_S)
            if not fetch.done():
                return False
            fetch.result()
            return True
        finally:
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)

    def _may_continue(self, prefetch: ArtifactPrefetch) -> bool:
        return not self.supervisor.is_fetching() and prefetch in self.node.prefetches()
