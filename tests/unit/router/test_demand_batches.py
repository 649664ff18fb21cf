"""A window of demand with very many rows."""

import time
from pathlib import Path

import msgspec
import pytest

from isochrone.wire.ids import BootId, DeploymentId, PopId, RouterId
from isochrone.wire.peers.usage import Demand, DemandRow
from router.fleet_state import FleetState
from router.loops import ship_reports
from router.loops.ship_reports import ReportShipper
from router.loops.usage_spool import UsageSpool
from router.recording.metrics import Metrics
from scheduler.decide.demand.intake import DEMAND_ROWS_MAX


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

    def take_demand(self) -> tuple[DemandRow, ...]:
        return self.rows


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (3, [3]), (4, [3, 1]), (9, [3, 3, 3])])
async def test_a_window_with_many_rows_is_sent_in_several_batches(
    count: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ship_reports.DEMAND_ROWS_PER_BATCH_MAX <= DEMAND_ROWS_MAX
    monkeypatch.setattr(ship_reports, "DEMAND_ROWS_PER_BATCH_MAX", 3)
    sent: list[Demand] = []

    async def send(message: msgspec.Struct) -> bool:
        assert isinstance(message, Demand)
        sent.append(message)
        return True

    recorder = Rows(count)
    shipper = ReportShipper(
        router_id=RouterId("r"),
        boot_id=BootId("b"),
        fleet=FleetState(PopId("ams"), time.monotonic),
        recorder=recorder,  # type: ignore[arg-type]
        metrics=Metrics(),
        spool=UsageSpool(tmp_path, 1000),
        send=send,
        clock=time.monotonic,
        unix_clock=time.time,
        resend_s=100.0,
        table_refusal=lambda: "",
    )
    assert await shipper.ship_demand() == count
    sent.sort(key=lambda demand: demand.seq)
    assert [len(demand.rows) for demand in sent] == sizes
    assert [row for demand in sent for row in demand.rows] == list(recorder.rows)
    assert len({demand.window_s for demand in sent}) == 1
