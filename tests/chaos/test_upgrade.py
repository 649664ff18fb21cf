"""An upgrade process by process under running streams (G4): no answer is cut, no engine restarted.

Every process ends by SIGTERM and is started anew in the order that docs/operations.md gives. The
second city starts while no scheduler and no Postgres runs, from files as the previous release wrote
them: without the fields that `ops/golden/formats.json` does not have.
`python -m tests.system.upgrade CHECKOUT` does the same with a checkout of that release.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.service.files import read_snapshot, write_snapshot
from ops.golden.make_formats import FILE
from tests.chaos.invariants import invariants
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, under_load, wait_ended

SAMPLE_KEY = "a1"
"""What the golden file has as the key of mappings with any keys."""


def as_before(value: Any, sample: Any) -> Any:
    """Return `value` without the fields that the previous release did not have."""
    if isinstance(value, dict) and isinstance(sample, dict) and SAMPLE_KEY not in sample:
        return {
            name: as_before(field, sample[name]) for name, field in value.items() if name in sample
        }
    if isinstance(value, list) and isinstance(sample, list) and sample:
        return [as_before(entry, sample[0]) for entry in value]
    return value


def write_as_before(path: Path, kind: str) -> None:
    """Rewrite a stored snapshot as the previous release wrote it."""
    payload = read_snapshot(path)
    assert payload is not None, path
    stored = msgspec.msgpack.decode(payload)
    sample = json.loads(FILE.read_text())[kind]["whole"]
    write_snapshot(path, msgspec.msgpack.encode(as_before(stored, sample)))


async def is_heard(fleet: Fleet) -> bool:
    status = [await fleet.ask("GET", "/v1/status", of=name) for name in ("a", "b")]
    acting = [one for one in status if one["acting"]]
    ready = len(acting) == 1 and acting[0]["nodes_ready"] == acting[0]["routers_ready"] == 2
    return bool(ready and await fleet.is_warm(2, CITIES))


async def restart(fleet: Fleet, part: str, load: Load) -> None:
    """Stop a part by SIGTERM, start it again, and wait for some answers."""
    await fleet.processes.stop(part)
    kind, _, name = part.partition("-")
    if kind == "scheduler":
        await fleet.start_scheduler(name)
    elif kind == "node":
        await fleet.start_node(name, keep_engines_on_stop=True)
    else:
        await fleet.start_router(name)
    await wait_ended(load, 6)


@pytest.mark.asyncio
async def test_streams_outlive_an_upgrade_of_every_process() -> None:
    async with a_fleet(comes_up=False) as fleet:
        for pop in CITIES:
            fleet.settings[f"node-{pop}"] = {"keep_engines_on_stop": True}
        for name in ("a", "b"):
            # Both are killed at once, and the next one waits for the lease.
            fleet.settings[f"scheduler-{name}"] = {"lease_ttl_s": 3.0}
        await fleet.up()
        await fleet.start_scheduler("b")
        await fleet.deploy(replicas=2)
        engines = fleet.engine_pids()
        async with under_load(fleet, [*CITIES], streams=4) as load:
            await wait_ended(load, 6)
            for name in ("b", "a"):
                await restart(fleet, f"scheduler-{name}", load)
            await until("a scheduler acts and hears all", lambda: is_heard(fleet))
            for part in ("node-ams", "router-ams"):
                await restart(fleet, part, load)
            await until("all are heard", lambda: is_heard(fleet))
            for part in ("scheduler-a", "scheduler-b", "postgres"):
                await fleet.kill(part)
            state = {kind: fleet.folder / f"{kind}-sin" for kind in ("router", "node")}
            await fleet.processes.stop("router-sin")
            write_as_before(state["router"] / "table.snapshot", "RouteTable")
            await fleet.start_router("sin")
            await fleet.processes.stop("node-sin")
            write_as_before(state["node"] / "assignment", "Assignment")
            await fleet.start_node("sin", keep_engines_on_stop=True)
            await wait_ended(load, 6)
            await fleet.start_postgres()
            for name in ("a", "b"):
                await fleet.start_scheduler(name)
            await until("all are heard again", lambda: is_heard(fleet))
            before = len(load.ended)
            await wait_ended(load, 8)
        # A router that is stopped accepts no connection; what it had accepted it answers whole.
        cut = [one for one in load.failures() if one.how != "reset" or one.tokens]
        assert not cut, cut
        assert not [one for one in load.ended[before:] if one.how != "complete"]
        assert fleet.engine_pids() == engines, "an engine was started again"
        fleet.note_baseline()
        await invariants(fleet, load)
