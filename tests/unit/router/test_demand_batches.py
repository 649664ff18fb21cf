"""Windows of demand, and usage, with very many rows."""

from pathlib import Path

import msgspec
import pytest

from isochrone.wire.ids import BootId, DeploymentId, PopId, RouterId
from isochrone.wire.peers.usage import Demand, DemandRow, Usage, UsageRow
from router.fleet_state import FleetState
from router.loops import ship_reports
from router.loops.ship_reports import ReportShipper
from router.recording.metrics import Metrics
from router.recording.usage_spool import UsageSpool
from scheduler.decide.demand.intake import DEMAND_ROWS_MAX
from tests.unit.scheduler.test_intake import a_usage


class Trials:
    def take(self) -> tuple[()]:
        return ()


class Rows:
    """Stands for the recorder: demand of one window."""

    def __init__(self, count: int) -> None:
        self.trials = Trials()
        self.rows = tuple(
            DemandRow(deployment_id=DeploymentId(f"d{n}"), pop=PopId("ams"), requests=1)
            for n in range(count)
        )
        self.usage: tuple[UsageRow, ...] = ()

    def take_demand(self) -> tuple[DemandRow, ...]:
        return self.rows

    def take_usage(self) -> tuple[tuple[UsageRow, ...], tuple[()]]:
        return self.usage, ()

    def put_back(self, rows: tuple[UsageRow, ...]) -> None:
        self.usage = rows


class Link:
    """Takes what is sent, while it is up; and the shipper that sends it. A second is a turn."""

    def __init__(self, rows: int, folder: Path) -> None:
        self.sent: list[Demand] = []
        self.usage_sent: list[Usage] = []
        self.is_up = True
        self.refusal = ""
        self.now_s = 0.0
        self.metrics = Metrics()
        self.recorder = Rows(rows)
        self.spool = UsageSpool(folder, 1_000_000)
        self.shipper = ReportShipper(
            router_id=RouterId("r"),
            boot_id=BootId("b"),
            fleet=FleetState(PopId("ams"), self.clock),
            recorder=self.recorder,  # type: ignore[arg-type]
            metrics=self.metrics,
            spool=self.spool,
            send=self.send,
            clock=self.clock,
            unix_clock=self.clock,
            resend_s=100.0,
            table_refusal=lambda: self.refusal,
        )

    def clock(self) -> float:
        return self.now_s

    async def send(self, message: msgspec.Struct) -> bool:
        if self.is_up and isinstance(message, Usage):
            self.usage_sent.append(message)
        elif self.is_up:
            assert isinstance(message, Demand)
            self.sent.append(message)
        return self.is_up

    async def turn(self) -> list[int]:
        """Ship once; return the numbers of the windows that were sent."""
        self.sent.clear()
        self.now_s += 1.0
        await self.shipper.ship_demand()
        assert all(demand.sent_at == self.now_s for demand in self.sent)
        return [demand.seq for demand in self.sent]


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (3, [3]), (4, [3, 1]), (9, [3, 3, 3])])
async def test_a_window_with_many_rows_is_sent_in_several_batches(
    count: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ship_reports.DEMAND_ROWS_PER_BATCH_MAX <= DEMAND_ROWS_MAX
    monkeypatch.setattr(ship_reports, "DEMAND_ROWS_PER_BATCH_MAX", 3)
    link = Link(count, tmp_path)
    recorder, sent = link.recorder, link.sent
    assert await link.shipper.ship_demand() == count
    sent.sort(key=lambda demand: demand.seq)
    assert [len(demand.rows) for demand in sent] == sizes
    assert [row for demand in sent for row in demand.rows] == list(recorder.rows)
    assert len({demand.window_s for demand in sent}) == 1


async def test_a_turn_sends_few_batches_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage there may be 360: they would be read before anything else of this router."""
    monkeypatch.setattr(ship_reports, "BATCHES_PER_TURN_MAX", 2)
    link = Link(1, tmp_path)
    link.is_up = False
    for _ in range(4):
        await link.turn()
    link.is_up = True
    assert [await link.turn() for _ in range(4)] == [[5, 4], [6, 3], [7, 2], [8, 1]]


async def test_the_oldest_of_too_many_windows_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship_reports, "DEMAND_WINDOWS_MAX", 3)
    link = Link(2, tmp_path)
    link.is_up = False
    for _ in range(5):
        await link.turn()
    assert link.metrics.demand_dropped._value.get() == 4
    link.is_up = True
    assert await link.turn() == [6, 5, 4]


async def test_the_scheduler_is_told_which_table_is_served_and_why_no_newer_one(
    tmp_path: Path,
) -> None:
    link = Link(1, tmp_path)
    link.refusal = "quarantined: it drops every deployment"
    await link.turn()
    (demand,) = link.sent
    assert (demand.table_generation, demand.table_refusal) == (0, link.refusal)


async def test_much_usage_is_spooled_in_batches_that_the_scheduler_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship_reports, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(ship_reports, "BATCHES_PER_TURN_MAX", 2)
    link = Link(0, tmp_path)
    usage = link.recorder.usage = tuple(a_usage(f"q{n}") for n in range(8))
    shipped = await link.shipper.ship_usage()
    assert shipped == (8, 2, 3)
    assert link.recorder.usage == ()
    # The third one has its turn later, and none is sent twice before `resend_s`.
    await link.shipper.ship_usage()
    assert [len(batch.rows) for batch in link.usage_sent] == [3, 3, 2]
    assert tuple(row for batch in link.usage_sent for row in batch.rows) == usage
    assert len({batch.batch_id for batch in link.usage_sent}) == 3


def test_a_batch_that_is_confirmed_before_it_is_read_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = UsageSpool(tmp_path, 1_000_000)
    for name in ("1", "2"):
        spool.add(Usage(router_id=RouterId("r"), batch_id=name, rows=(a_usage(),)))
    spool.remove("1")
    assert spool.read("1") is None
    assert not caplog.records
    (tmp_path / "2.usage").unlink()
    assert spool.read("2") is None
    assert "cannot read spooled usage" in caplog.text
