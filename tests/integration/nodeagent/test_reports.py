"""The node's report, with a real disk."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.service.network.control_link import Progress
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, NodeId
from isochrone.wire.peers.report import Pulse, Report
from nodeagent.config import NodeConfig
from nodeagent.host.artifacts import tiers
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.loops.report import PulseJob, ReportJob
from tests.integration.nodeagent.test_artifacts import a_folder, a_store, artifact_of, fetched

CONFIG = NodeConfig(name="n1", schedulers=(), state=Path("x"), address="http://n1")


class Link:
    """A control link that accepts every report."""

    connected = True

    def __init__(self) -> None:
        self.sent: list[Report] = []

    async def send(self, report: Report) -> bool:
        self.sent.append(report)
        return True


async def no_devices() -> tuple[()]:
    return ()


def a_job(artifacts: ArtifactStore, link: Any) -> ReportJob:
    node: Any = SimpleNamespace(
        node_id=NodeId("n1"),
        boot_id=BootId("b"),
        refusals=(),
        lacking_engines={},
        prefetches=tuple,
        read_devices=no_devices,
        progress=lambda: Progress(ClusterId("c"), Generation(1), Epoch(1)),
    )
    supervisor: Any = SimpleNamespace(replicas={}, pinned=tuple, forget=lambda stopped: None)
    return ReportJob(
        config=CONFIG, node=node, supervisor=supervisor, artifacts=artifacts, link=link
    )


async def test_an_artifact_deleted_during_the_report_does_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, link = a_store(tmp_path), Link()
    artifact = artifact_of(a_folder(tmp_path, a=b"aaa"), {"a": b"aaa"})
    path = await fetched(store, artifact)
    job = a_job(store, link)
    await job.run_once()
    check = tiers.is_in_host_memory

    def delete_first(files: Any, was: bool = False) -> bool:
        path.rename(path.with_suffix(".partial"))
        return check(files, was)

    monkeypatch.setattr(tiers, "is_in_host_memory", delete_first)
    await job.run_once()
    monkeypatch.undo()
    await job.run_once()
    assert [report.artifacts for report in link.sent] == [(artifact.digest,)] * 2 + [()]


async def test_a_disk_that_cannot_be_read_does_not_prevent_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, link = a_store(tmp_path), Link()
    artifact = artifact_of(a_folder(tmp_path, a=b"aaa"), {"a": b"aaa"})
    await fetched(store, artifact)
    job = a_job(store, link)
    await job.run_once()

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store, "disk_free_bytes", broken)
    for _ in range(2):
        assert (await job.run_once()).sent
    assert [report.artifacts for report in link.sent] == [(artifact.digest,)] * 3
    warnings = [record for record in caplog.records if "cannot examine" in record.message]
    assert len(warnings) == 1


async def test_a_pulse_says_when_it_was_sent() -> None:
    """The scheduler compares the clocks."""
    link: Any = Link()
    node: Any = SimpleNamespace(
        node_id=NodeId("n1"),
        boot_id=BootId("b"),
        assignment_refusal="",
        progress=lambda: Progress(ClusterId("c"), Generation(1), Epoch(1)),
    )
    now = iter((1000.0, 1002.0))
    job = PulseJob(node, link, now.__next__)
    assert [await job.run_once() for _ in range(2)] == [True, True]
    pulses: list[Pulse] = link.sent
    assert [(pulse.seq, pulse.sent_at) for pulse in pulses] == [(1, 1000.0), (2, 1002.0)]
