"""Weights fetched before they are needed: at their own pace, and never in a start's way."""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from isochrone.wire.assignment import ArtifactPrefetch
from nodeagent.host.link import MEASURED_BYTES_MIN, TransferLink
from nodeagent.loops.prefetch import PrefetchCounts, PrefetchJob
from tests.integration.nodeagent.test_artifacts import Origin, a_store, artifact_of, origin
from tests.system.harness import until

__all__ = ["origin"]

BODY = random.Random(3).randbytes(4_000_000)


class Node:
    """What the duty asks of the agent: what is wished, what runs, whether a start waits."""

    def __init__(self, *wished: ArtifactPrefetch) -> None:
        self.wished = wished
        self.starts = False
        self.reports = 0

    def prefetches(self) -> tuple[ArtifactPrefetch, ...]:
        return self.wished

    def is_fetching(self) -> bool:
        return self.starts

    def pinned(self) -> tuple[str, ...]:
        return ()

    def nudge_report(self) -> None:
        self.reports += 1


def a_duty(node: Node, store: Any) -> PrefetchJob:
    return PrefetchJob(cast(Any, node), cast(Any, node), store)


async def test_a_start_goes_first_and_goes_on_from_the_bytes_that_came(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/m.gguf"] = BODY
    artifact = artifact_of(url, {"m.gguf": BODY})
    node = Node(ArtifactPrefetch(artifact=artifact, bytes_per_s=500_000.0))
    store = a_store(tmp_path)
    duty = a_duty(node, store)
    turn = asyncio.create_task(duty.run_once())

    async def is_begun() -> bool:
        return bool(store.fetched_bytes(artifact.digest))

    await until("some of it came", is_begun)
    node.starts = True
    assert await turn == PrefetchCounts(is_suspended=True)
    assert await duty.run_once() == PrefetchCounts(is_suspended=True), (
        "it waits for as long as the start does"
    )
    assert store.digests() == ()
    path = await store.ensure(artifact, (), lambda _: None)
    assert (path / "m.gguf").read_bytes() == BODY
    assert len(served.ranges) == 1, "from where it was"
    node.starts = False
    assert await duty.run_once() == PrefetchCounts(), "it is there"


async def test_one_that_fails_keeps_no_other_waiting_and_one_taken_back_ends(
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
    turn = asyncio.create_task(a_duty(node, store).run_once())

    async def is_begun() -> bool:
        return bool(store.fetched_bytes(slow.artifact.digest))

    await until("the last is under way", is_begun)
    node.wished = (bad, good)
    assert await turn == PrefetchCounts(fetched=1, failed=1, is_suspended=True)
    assert store.digests() == (good.artifact.digest,)
    assert node.reports == 1


async def test_a_part_of_a_link_counts_against_the_whole_and_teaches_nothing() -> None:
    clock = [0.0]
    whole = TransferLink(1000.0, lambda: clock[0])
    part = whole.limited_to(100.0)
    assert whole.limited_to(0) is whole, "no bound of its own"
    assert await part.throttle(100) == 0, "a second's worth at once"
    assert await whole.throttle(900) == 0
    assert await whole.throttle(1) == pytest.approx(0.001, rel=0.1), "the part's bytes count"
    part.record(MEASURED_BYTES_MIN, 1.0)
    whole.record(MEASURED_BYTES_MIN - 1, 1.0)
    assert whole.measured_bytes_per_s == 0
    whole.record(MEASURED_BYTES_MIN, 1.0)
    assert whole.measured_bytes_per_s == MEASURED_BYTES_MIN
    whole.record(MEASURED_BYTES_MIN, 2.0)
    assert MEASURED_BYTES_MIN / 2 < whole.measured_bytes_per_s < MEASURED_BYTES_MIN
