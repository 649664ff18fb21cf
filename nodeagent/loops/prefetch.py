"""Fetches weights that this node is to have before it runs them, one artifact at a time.

A start goes first: as soon as a replica waits for its weights, what is fetched here waits for it,
and goes on later from the bytes that came.
"""

import asyncio
import logging
from typing import Final, NamedTuple

from isochrone.wire.assignment import ArtifactPrefetch
from nodeagent.host.artifacts import ArtifactStore
from nodeagent.host.download import ArtifactError
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

log = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 0.5


class PrefetchCounts(NamedTuple):
    """One turn's counts; `waits` where a start went first or the wish was taken back."""

    fetched: int = 0
    failed: int = 0
    waits: bool = False


class PrefetchJob:
    """What is wished is in the assignment, in its order; one that fails keeps no other waiting."""

    def __init__(self, node: NodeState, supervisor: Supervisor, artifacts: ArtifactStore) -> None:
        self._node = node
        self._supervisor = supervisor
        self._artifacts = artifacts

    async def run_once(self) -> PrefetchCounts:
        """Fetch what is wished and not here; a turn may take as long as the weights do."""
        fetched = failed = 0
        for wished in self._node.prefetches():
            if wished.artifact.digest in await asyncio.to_thread(self._artifacts.held):
                continue
            if not self._may_go_on(wished):
                return PrefetchCounts(fetched, failed, waits=True)
            try:
                if not await self._fetch(wished):
                    return PrefetchCounts(fetched, failed, waits=True)
            except ArtifactError as error:
                failed += 1
                log.warning("not prefetched", extra={"fields": {"reason": str(error)}})
            else:
                fetched += 1
                self._node.nudge_report()
        return PrefetchCounts(fetched, failed)

    async def _fetch(self, wished: ArtifactPrefetch) -> bool:
        """Fetch one artifact; False where it had to stop for something else."""
        pinned = {one.artifact.digest for one in self._node.prefetches()}
        fetch = asyncio.create_task(
            self._artifacts.ensure(
                wished.artifact,
                pinned | set(self._supervisor.pinned()),
                lambda _: None,
                bytes_per_s=wished.bytes_per_s,
            )
        )
        try:
            while not fetch.done() and self._may_go_on(wished):
                await asyncio.wait((fetch,), timeout=LOOK_INTERVAL_S)
            if not fetch.done():
                return False
            fetch.result()
            return True
        finally:
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)

    def _may_go_on(self, wished: ArtifactPrefetch) -> bool:
        return not self._supervisor.is_fetching() and wished in self._node.prefetches()
