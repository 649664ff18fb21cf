"""The demo's state folder: one fleet at a time, and only its own processes are killed."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from isochrone.service.files import lock_state_folder
from ops.fleet.bring_up import LocalFleet, kill_leftovers
from ops.fleet.processes import StartFailed


async def test_leftovers_of_a_killed_fleet_are_killed_and_readers_of_its_logs_are_not(
    tmp_path: Path,
) -> None:
    log = tmp_path / "router.log"
    log.touch()
    waits = "import signal; signal.pause()"
    left = await asyncio.create_subprocess_exec(sys.executable, "-c", waits, str(log))
    reader = await asyncio.create_subprocess_exec("tail", "-f", str(log))
    try:
        async with asyncio.timeout(30):
            while left.returncode is None:
                await asyncio.to_thread(kill_leftovers, tmp_path)
                await asyncio.sleep(0.05)
        assert left.returncode == -signal.SIGKILL
        assert reader.returncode is None
    finally:
        for process in (left, reader):
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_second_fleet_in_one_folder_is_refused_and_kills_nothing(tmp_path: Path) -> None:
    state = tmp_path / "fleet"
    with lock_state_folder(state):
        waits = "import signal; signal.pause()"
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-c", waits, f"{state}/node-ams"
        )
        try:
            fleet = LocalFleet(state, lambda line: None)
            with pytest.raises(
                StartFailed, match="another process uses it; is the service running already"
            ):
                await fleet.up()
            await fleet.down()
            assert running.returncode is None
        finally:
            running.kill()
            await running.wait()
