"""Several processes behind one port: they share the table, and where prompts were read."""

import asyncio
import errno
import itertools
import os
import re
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from isochrone.wire import codec
from isochrone.wire.ids import DeploymentId, ReplicaId
from isochrone.wire.usage import Usage
from router import build, processes
from router.app import SHARE_INTERVAL_S, open_router
from router.decide.prefix_index import PrefixKeys
from router.processes import WorkerIdentity, WorkerPipe, WorkerPool
from router.prompt_sharing import SharedPrompt, SharedPrompts
from tests.cuts import held
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_table, an_identity
from tests.integration.router.test_process import BODY, START_TIMEOUT_S, a_process, prepare

REQUESTS = 60


async def healths(port: int, count: int) -> set[int]:
    """Look at its health over a new connection each time; return the statuses seen."""
    seen = set()
    for _ in range(count):
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/healthz") as response,
        ):
            seen.add(response.status)
    return seen


async def ask_many(port: int, count: int, body: dict[str, Any] = BODY) -> int:
    """Ask over a new connection each time; return how many were answered."""
    answered = 0
    for _ in range(count):
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
            http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response,
        ):
            answered += response.status == 200
    return answered


def workers_of(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


async def until(holds: Any) -> None:
    """Wait until `holds()`."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.05)


def spooled(state: Path) -> dict[str, int]:
    """Return how many requests each process has put on disk."""
    counts: dict[str, int] = {}
    for path in state.rglob("*.usage"):
        rows = msgspec.msgpack.decode(path.read_bytes(), type=Usage).rows
        counts[path.parent.parent.name] = counts.get(path.parent.parent.name, 0) + len(rows)
    return counts


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_worker_listens_once_it_has_a_table_or_waited_long(
    tmp_path: Path, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.FIRST_TABLE_S", 10.0 if is_told else 0.05)
    ours, theirs = socket.socketpair()
    main = WorkerPipe(ours, None)
    await main.open()
    worker = WorkerIdentity(1, theirs, 0)
    if is_told:
        assert main.write(a_table([]))
    async with open_router(a_config(tmp_path), an_identity(tmp_path), worker) as house:
        assert house.port
        assert (house.fleet.directory.table is not None) is is_told
        main.close()
        await house.stopping.wait()


async def test_who_reads_nothing_holds_no_more_than_so_much_memory() -> None:
    ours, theirs = socket.socketpair()
    main, other = WorkerPipe(ours, None), WorkerPipe(theirs, codec.decoder(SharedPrompts))
    await main.open()
    row = SharedPrompt(
        DeploymentId("d"), ReplicaId("r"), PrefixKeys([1] * 100_000, [1] * 100_000, 1)
    )
    sent = sum(itertools.takewhile(bool, (main.write(SharedPrompts((row,))) for _ in range(100))))
    assert 0 < sent < 100
    # Who reads again gets all that was sent, and more.
    await other.open()
    for _ in range(sent):
        assert await other.read() == SharedPrompts((row,))
    assert main.write(SharedPrompts(()))
    assert await other.read() == SharedPrompts(())
    main.close()
    assert await other.read() is None
    other.close()


async def test_a_worker_that_hangs_is_replaced_and_holds_up_nobodys_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.processes.SILENCE_S", 1.0)
    config, port = prepare(tmp_path)
    monkeypatch.setattr(sys, "argv", ["router", "--config", str(config)])

    async def send(message: msgspec.Struct) -> bool:
        return True

    workers = WorkerPool(1, send, lambda: None, lambda rows: None, end_timeout_s=0.2)
    running = asyncio.create_task(workers.run(port))
    stopped: list[psutil.Process] = []

    def fresh() -> list[psutil.Process]:
        # The tests' Postgres is a child of this process too.
        found = []
        for one in psutil.Process().children():
            # One that was killed is a zombie for a moment.
            with suppress(psutil.Error):
                found += [one] if "router" in one.cmdline() and one not in stopped else []
        return found

    def hung() -> int:
        for one in fresh():
            # One that was slow to start has been replaced meanwhile.
            with suppress(psutil.NoSuchProcess):
                one.suspend()
                stopped.append(one)
        return len(stopped)

    await until(lambda: hung() == 2)
    running.cancel()
    async with asyncio.timeout(START_TIMEOUT_S):
        with suppress(asyncio.CancelledError):
            await running
    # One killed while it was being started is nobody's to wait for: it stays a zombie.
    statuses = []
    for one in stopped:
        with suppress(psutil.NoSuchProcess):
            statuses.append(one.status())
    assert set(statuses) <= {psutil.STATUS_ZOMBIE}


async def test_they_serve_one_port_and_each_keeps_its_own_ledger(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_node(FakeNode()))
        config, port = prepare(tmp_path, node)
        config.write_text(config.read_text().replace("processes = 1", "processes = 3"))
        process = await stack.enter_async_context(a_process(config, port))
        await until(lambda: len(workers_of(process)) == 2)
        state = tmp_path / "state"
        # A worker has its table from the main process, and keeps it too.
        tables = [state / f"worker-{n}" / "table.snapshot" for n in (1, 2)]
        await until(lambda: all(table.exists() for table in tables))
        assert await healths(port, 20) == {200}
        assert await ask_many(port, REQUESTS) == REQUESTS
        await until(lambda: sum(spooled(state).values()) == REQUESTS)
        assert set(spooled(state)) == {"state", "worker-1", "worker-2"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/metrics") as response,
        ):
            page = await response.text()
        counted = re.findall(r"isochrone_router_requests_total\{.*complete.*\} ([0-9.]+)", page)
        assert sum(float(count) for count in counted) == REQUESTS
        compiled = build.facts()["compiled"]
        assert re.search(rf'isochrone_router_build_info{{compiled="{compiled}",.*}} 1\.0', page)


async def test_a_killed_worker_comes_back_and_all_end_with_the_main_one(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_node(FakeNode()))
        config, port = prepare(tmp_path, node)
        config.write_text(config.read_text().replace("processes = 1", "processes = 2"))
        process = await stack.enter_async_context(a_process(config, port))
        await until(lambda: len(workers_of(process)) == 1)
        killed = workers_of(process)[0].pid
        os.kill(killed, signal.SIGKILL)
        await until(lambda: [w.pid for w in workers_of(process) if w.pid != killed])
        assert await ask_many(port, 10) == 10
        left = workers_of(process)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_TIMEOUT_S):
            assert await process.wait() == 0
        await until(lambda: not any(worker.is_running() for worker in left))


async def test_they_tell_one_another_where_prompts_were_read(tmp_path: Path) -> None:
    """Whoever of them a prompt comes to, it goes where its beginning is cached."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(open_node(FakeNode(f"n{n}"))) for n in (1, 2)]
        for node in nodes:
            node.cached_tokens = 11
        # A prompt takes a second, so that where it is cached is where it should go.
        config, port = prepare(tmp_path, *nodes, prefill_tokens_per_s=10.0)
        config.write_text(config.read_text().replace("processes = 1", "processes = 3"))
        await stack.enter_async_context(a_process(config, port))
        tables = [tmp_path / "state" / f"worker-{n}" / "table.snapshot" for n in (1, 2)]
        await until(lambda: all(table.exists() for table in tables))
        async with asyncio.timeout(START_TIMEOUT_S):
            # Another prompt each turn: one that both nodes have read says nothing.
            for turn in itertools.count():
                asked = [node.asked for node in nodes]
                text = f"{turn} word " * 1000
                body = {**BODY, "messages": [{"role": "user", "content": text}]}
                assert await ask_many(port, 1, body) == 1
                other = next(n for n, node in enumerate(nodes) if node.asked == asked[n])
                await asyncio.sleep(1.5 * SHARE_INTERVAL_S)
                assert await ask_many(port, 12, body) == 12
                if nodes[other].asked == asked[other]:
                    break


def some_workers(end_timeout_s: float = 0.2) -> WorkerPool:
    async def send(_: msgspec.Struct) -> bool:
        return True

    return WorkerPool(1, send, lambda: None, lambda _: None, end_timeout_s=end_timeout_s)


async def test_a_worker_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has no memory left: the main process must not end for it as well."""
    started = asyncio.Event()

    async def start(*_: Any, pass_fds: tuple[int, ...], **__: Any) -> asyncio.subprocess.Process:
        if not started.is_set():
            started.set()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        # It holds its end of the pipe, as a worker does: else it would count as ended.
        return await asyncio.subprocess.create_subprocess_exec("sleep", "60", pass_fds=pass_fds)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "RESTART_PAUSE_S", 0.0)
    workers = some_workers()
    before = held()
    running = asyncio.create_task(workers.run(1))
    async with asyncio.timeout(START_TIMEOUT_S):
        while not workers._sent_tables:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert held() == before


async def test_a_worker_that_hangs_does_not_outlive_who_is_ending_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would keep its share of the port's connections, and answer none of them."""
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 60\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    monkeypatch.setattr(processes, "SILENCE_S", 0.01)
    ending = asyncio.Event()
    workers = some_workers(end_timeout_s=60.0)
    end = workers._stop

    async def seen_off(process: asyncio.subprocess.Process) -> None:
        asyncio.get_running_loop().call_later(0.05, ending.set)
        await end(process)

    monkeypatch.setattr(workers, "_stop", seen_off)
    before = held()
    running = asyncio.create_task(workers.run(1))
    async with asyncio.timeout(START_TIMEOUT_S):
        await ending.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert held() == before


async def test_a_frame_that_comes_in_two_parts_is_read_whole_however_late_the_second_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 0.1)
    ours, theirs = socket.socketpair()
    pipe = WorkerPipe(ours, processes._FROM_WORKER)
    await pipe.open()
    frame = codec.encode(SharedPrompts(()))
    with theirs:
        theirs.send(len(frame).to_bytes(processes.LENGTH_PREFIX_BYTES, "big"))
        asyncio.get_running_loop().call_later(0.15, theirs.send, frame)
        assert await processes._next_message(pipe) == SharedPrompts(())
    pipe.close()
