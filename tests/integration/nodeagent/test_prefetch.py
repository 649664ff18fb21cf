"""Prefetching artifacts: at its own rate, and never delaying a start."""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from isochrone.wire.peers.assignment import ArtifactPrefetch
from nodeagent.host.artifacts.link import MEASURED_BYTES_MIN, TransferLink
from nodeagent.loops.prefetch import PrefetchCounts, PrefetchJob
from tests.integration.nodeagent.test_artifacts import Origin, a_store, artifact_of, origin
from tests.system.harness import until

__all__ = ["origin"]

BODY = random.Random(3).randbytes(4_000_000)


class Node:
    """The parts of node and supervisor that the job uses."""

    def __init__(self, *listed: ArtifactPrefetch) -> None:
        self.listed = listed
        self.has_start = False
        self.reports = 0

    def prefetches(self) -> tuple[ArtifactPrefetch, ...]:
        return self.listed

    def is_fetching(self) -> bool:
        return self.has_start

    def pinned(self) -> tuple[str, ...]:
        return ()

    def nudge_report(self) -> None:
        self.reports += 1


def a_job(node: Node, store: Any) -> PrefetchJob:
    return PrefetchJob(cast(Any, node), cast(Any, node), store)


async def test_a_start_suspends_the_prefetch_and_resumes_its_bytes(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/m.gguf"] = BODY
    artifact = artifact_of(url, {"m.gguf": BODY})
    node = Node(ArtifactPrefetch(artifact=artifact, bytes_per_s=500_000.0))
    store = a_store(tmp_path)
    job = a_job(node, store)
    turn = asyncio.create_task(job.run_once())

    async def is_begun() -> bool:
        return bool(store.fetched_bytes(artifact.digest))

    await until("the fetch has begun", is_begun)
    node.has_start = True
    assert await turn == PrefetchCounts(is_suspended=True)
    assert await job.run_once() == PrefetchCounts(is_suspended=True), (
        "it is suspended while the start waits"
    )
    assert store.digests() == ()
    path = await store.ensure(artifact, tuple, lambda _: None)
    assert (path / "m.gguf").read_bytes() == BODY
    assert len(served.ranges) == 1, "the start resumes the bytes"
    node.has_start = False
    assert await job.run_once() == PrefetchCounts(), "the artifact is complete"


async def test_a_failed_prefetch_does_not_stop_others_and_a_withdrawn_one_ends(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/good"] = b"good"
    served.files["/slow"] = BODY
    bad = ArtifactPrefetch(artifact=artifact_of(url, {"nowhere": b"bad"}))
    good = ArtifactPrefetch(artifact=artifact_of(url, {"good": b"good"}))
    slow = ArtifactPrefetch(artifact=artifact_of(url, {"slow": BODY}), bytes_per_s=100_000.0)
    node = Node(bad, good, slow)
    store = a_store(tmp_path)
    turn = asyncio.create_task(a_job(node, store).run_once())

    async def is_begun() -> bool:
        return bool(store.fetched_bytes(slow.artifact.digest))

    await until("the last fetch has begun", is_begun)
    node.listed = (bad, good)
    assert await turn == PrefetchCounts(fetched=1, failed=1, is_suspended=True)
    assert store.digests() == (good.artifact.digest,)
    assert node.reports == 1


async def test_a_limited_link_counts_against_its_parent_and_is_not_measured() -> None:
    clock = [0.0]
    whole = TransferLink(1000.0, lambda: clock[0])
    part = whole.limited_to(100.0)
    assert whole.limited_to(0) is whole, "no additional limit"
    assert await part.throttle(100) == 0, "within the burst"
    assert await whole.throttle(900) == 0
    assert await whole.throttle(1) == pytest.approx(0.001, rel=0.1), "the part's bytes count too"
    part.record(MEASURED_BYTES_MIN, 1.0)
    whole.record(MEASURED_BYTES_MIN - 1, 1.0)
    assert whole.measured_bytes_per_s == 0
    whole.record(MEASURED_BYTES_MIN, 1.0)
    assert whole.measured_bytes_per_s == MEASURED_BYTES_MIN
    whole.record(MEASURED_BYTES_MIN, 2.0)
    assert MEASURED_BYTES_MIN / 2 < whole.measured_bytes_per_s < MEASURED_BYTES_MIN
