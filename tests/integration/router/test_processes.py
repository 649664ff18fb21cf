"""Several processes on one port: they share the route table and the locations of cached prompts."""

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
from isochrone.wire.client_keys.key_use import KeyUse
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import DeploymentId, KeyId, ReplicaId, RouterId
from isochrone.wire.peers.routes import KeyLimits, RouteTablePart, diff
from isochrone.wire.peers.table_parts import PART_BYTES_MAX, TableAssembler
from isochrone.wire.peers.usage import Usage
from router import build, processes
from router.app import SHARE_INTERVAL_S, open_router
from router.decide.admission.limits import KeyLimiter
from router.loops.share_outboxes import OutboxSharer
from router.processes import WorkerIdentity, WorkerPipe, WorkerPool
from router.recording.former_workers import adopt_usage
from router.recording.usage_journal import UsageJournal
from router.recording.usage_spool import UsageSpool
from router.sharing.key_use_sharing import KeyUseOutbox, OwnKeyUse
from router.sharing.prompt_sharing import PromptOutbox, SharedPrompt, SharedPrompts
from router.sharing.suspicion_sharing import SuspicionOutbox
from tests.chaos.test_torn_files import a_row
from tests.cuts import held
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_key, a_table, an_identity
from tests.integration.router.test_process import BODY, START_TIMEOUT_S, a_process, prepare
from tests.unit.wire.assembling import add_part

REQUESTS = 60


async def healths(port: int, count: int) -> set[int]:
    """Request the health over new connections; return the statuses seen."""
    seen = set()
    for _ in range(count):
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/healthz") as response,
        ):
            seen.add(response.status)
    return seen


async def ask_many(port: int, count: int, body: dict[str, Any] = BODY) -> int:
    """Send requests over new connections; return how many were answered."""
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


async def until(condition: Any) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.05)


def spooled(state: Path) -> dict[str, int]:
    """Return the number of requests that each process has written to disk."""
    counts: dict[str, int] = {}
    for path in state.rglob("*.usage"):
        rows = msgspec.msgpack.decode(path.read_bytes(), type=Usage).rows
        counts[path.parent.parent.name] = counts.get(path.parent.parent.name, 0) + len(rows)
    return counts


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_worker_listens_once_it_has_a_table_or_has_waited_long(
    tmp_path: Path, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.FIRST_TABLE_S", 10.0 if is_told else 0.05)
    ours, theirs = socket.socketpair()
    main = WorkerPipe(ours, None)
    await main.open()
    worker = WorkerIdentity(1, theirs, 0)
    if is_told:
        assert await main.write_table(a_table([]), None)
    async with open_router(a_config(tmp_path), an_identity(tmp_path), worker) as app:
        assert app.port
        assert (app.fleet.directory.table is not None) is is_told
        main.close()
        await app.stopping.wait()


async def test_a_worker_is_sent_only_what_changed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    main = WorkerPipe(ours, None)
    await main.open()
    keys = [a_key(format_key(KeyId(f"{n:012d}"), bytes(32))) for n in range(3000)]
    first = a_table([], keys=keys)
    second = a_table([], generation=2, keys=keys[1:])
    sending = asyncio.create_task(main.write_table(first, None))
    worker = WorkerIdentity(1, theirs, 0)
    async with open_router(a_config(tmp_path), an_identity(tmp_path), worker) as app:
        assert await sending
        assert app.fleet.directory.table == first
        (frame,) = processes._table_frames(second, first)
        assert len(frame) < 1000
        assert await main.write_table(second, first)
        async with asyncio.timeout(30):
            while app.follower.progress().generation != 2:
                await asyncio.sleep(0.01)
        assert app.fleet.directory.table == second
        main.close()
        await app.stopping.wait()


async def test_a_worker_reports_what_its_requests_draw_from_a_keys_rates(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    main = WorkerPipe(ours, processes._FROM_WORKER)
    await main.open()
    key = a_key(limits=KeyLimits(requests_per_min=60, tokens_per_min=6000))

    async def reported() -> KeyUse:
        while True:
            message = await main.read()
            if isinstance(message, OwnKeyUse):
                (row,) = message.rows
                return row

    worker = WorkerIdentity(1, theirs, 0)
    async with open_router(a_config(tmp_path), an_identity(tmp_path), worker) as app:
        app.limiter.admit(key, 100, 0.0, 0.0)
        async with asyncio.timeout(30):
            assert await reported() == KeyUse(key.key_id, 1, 100)
        main.close()
        await app.stopping.wait()


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def leave_usage(folder: Path, first: int) -> None:
    """Leave two rows of usage in a process's state folder: in a batch, and in the journal."""
    batch = Usage(router_id=RouterId("r"), batch_id=f"b{first}", rows=(a_row(first),))
    spool = UsageSpool(folder / "usage", 1 << 20)
    spool.open()
    spool.add(batch)
    journal = UsageJournal(folder / "journal", lambda: 0.0)
    journal.open()
    journal.append(a_row(first + 1), 0.0)
    journal.close()


async def test_usage_of_processes_that_are_no_more_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with fewer cores runs fewer processes."""
    config = a_config(tmp_path, processes=1, usage_interval_s=3600)
    state = config.state_folder
    for number in range(1, 4):
        leave_usage(state / f"worker-{number}", 10 * number)
    for other in ("worker-x", "worker-\u00b2"):
        (state / other).mkdir()
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "rename", refuse)
        assert adopt_usage(state, 1) == 0
    assert (adopt_usage(state, 2), adopt_usage(state, 2)) == (4, 0)
    # The files of the next start may have the names of those that were taken.
    leave_usage(state / "worker-3", 40)
    async with open_router(config, an_identity(tmp_path)):
        pass
    spool = UsageSpool(state / "usage", 1 << 20)
    spool.open()
    batches = [spool.read(batch_id) for batch_id in spool.batch_ids]
    found = [row.request_id for batch in batches if batch is not None for row in batch.rows]
    assert sorted(found) == [f"req-{n}" for n in (10, 11, 20, 21, 30, 31, 40, 41)]
    assert adopt_usage(state, 1) == 0


async def test_use_that_the_main_process_does_not_take_is_reported_again() -> None:
    taken: list[OwnKeyUse] = []

    class BusyMainProcess:
        async def send(self, message: msgspec.Struct) -> bool:
            if isinstance(message, OwnKeyUse):
                taken.append(message)
            return len(taken) != 1

    limiter = KeyLimiter()
    key = a_key(limits=KeyLimits(requests_per_min=60))
    busy: Any = BusyMainProcess()
    sharer = OutboxSharer(
        prompts=PromptOutbox(),
        suspicions=SuspicionOutbox(),
        parent=busy,
        workers=some_workers(),
        fleet_suspicions=SuspicionOutbox(),
        send=busy.send,
        clock=lambda: 0.0,
        take_key_use=limiter.take_unshared,
        key_use=KeyUseOutbox(),
    )
    for turn in range(3):
        limiter.admit(key, 1, float(turn), 0.0)
        await sharer.run_once()
    assert [message.rows for message in taken] == [
        (KeyUse(key.key_id, requests, 0),) for requests in (1, 2, 1)
    ]


def test_a_worker_is_sent_a_large_change_in_parts() -> None:
    first = a_table([])
    keys = [a_key(format_key(KeyId(f"{n:012d}"), bytes(32))) for n in range(5000)]
    second = a_table([], generation=2, keys=keys)
    frames = list(processes._table_frames(second, first))
    assert len(codec.encode(diff(first, second))) > processes.DELTA_BYTES_MAX
    assert len(frames) > 2
    # Requests have their turn after each frame.
    assert all(len(frame) <= PART_BYTES_MAX for frame in frames)
    assembler, decoder = TableAssembler(), codec.decoder(RouteTablePart)
    *incomplete, table = [add_part(assembler, codec.decode(f, decoder), first.keys) for f in frames]
    assert table == second and not any(incomplete)


async def test_a_process_that_does_not_read_uses_limited_memory() -> None:
    ours, theirs = socket.socketpair()
    main, other = WorkerPipe(ours, None), WorkerPipe(theirs, codec.decoder(SharedPrompts))
    await main.open()
    keys = [1] * 100_000
    row = SharedPrompt(DeploymentId("d"), ReplicaId("r"), keys, keys, 1)
    sent = sum(itertools.takewhile(bool, (main.write(SharedPrompts((row,))) for _ in range(100))))
    assert 0 < sent < 100
    # Once it reads again it gets all that was sent, and later messages.
    await other.open()
    for _ in range(sent):
        assert await other.read() == SharedPrompts((row,))
    assert main.write(SharedPrompts(()))
    assert await other.read() == SharedPrompts(())
    main.close()
    assert await other.read() is None
    other.close()


async def test_a_hanging_worker_is_replaced_and_does_not_delay_the_end(
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
        # The tests' Postgres is a child of this process too, and what forks their services.
        found = []
        for one in psutil.Process().children():
            # A killed process is a zombie for a moment.
            with suppress(psutil.Error):
                command = one.cmdline()
                is_worker = "router" in command and "tests.nursery" not in command
                found += [one] if is_worker and one not in stopped else []
        return found

    def hung() -> int:
        for one in fresh():
            # A slow worker may have been replaced already.
            with suppress(psutil.NoSuchProcess):
                one.suspend()
                stopped.append(one)
        return len(stopped)

    await until(lambda: hung() == 2)
    running.cancel()
    async with asyncio.timeout(START_TIMEOUT_S):
        with suppress(asyncio.CancelledError):
            await running
    # A process killed while it was being started is not waited for: it stays a zombie, once it has
    # released its memory.

    def have_ended() -> bool:
        for one in stopped:
            with suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    return False
        return True

    await until(have_ended)


async def test_processes_serve_one_port_and_each_writes_its_own_usage(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_node(FakeNode()))
        config, port = prepare(tmp_path, node)
        config.write_text(config.read_text().replace("processes = 1", "processes = 3"))
        process = await stack.enter_async_context(a_process(config, port))
        await until(lambda: len(workers_of(process)) == 2)
        state = tmp_path / "state"
        # A worker gets its table from the main process, and also writes it to disk.
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


async def test_a_killed_worker_is_replaced_and_workers_end_with_the_main_process(
    tmp_path: Path,
) -> None:
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


async def test_processes_share_the_locations_of_cached_prompts(tmp_path: Path) -> None:
    """A prompt goes where its prefix is cached, whichever process receives it."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(open_node(FakeNode(f"n{n}"))) for n in (1, 2)]
        for node in nodes:
            node.cached_tokens = 11
        # A prompt takes a second, so the node that has it cached is faster.
        config, port = prepare(tmp_path, *nodes, prefill_tokens_per_s=10.0)
        config.write_text(config.read_text().replace("processes = 1", "processes = 3"))
        await stack.enter_async_context(a_process(config, port))
        tables = [tmp_path / "state" / f"worker-{n}" / "table.snapshot" for n in (1, 2)]
        await until(lambda: all(table.exists() for table in tables))
        async with asyncio.timeout(START_TIMEOUT_S):
            # A new prompt each time: one that both nodes have read proves nothing.
            for turn in itertools.count():
                requests_before = [node.requests for node in nodes]
                text = f"{turn} word " * 1000
                body = {**BODY, "messages": [{"role": "user", "content": text}]}
                assert await ask_many(port, 1, body) == 1
                other = next(
                    n for n, node in enumerate(nodes) if node.requests == requests_before[n]
                )
                await asyncio.sleep(1.5 * SHARE_INTERVAL_S)
                assert await ask_many(port, 12, body) == 12
                if nodes[other].requests == requests_before[other]:
                    break


def some_workers(end_timeout_s: float = 0.2) -> WorkerPool:
    async def send(_: msgspec.Struct) -> bool:
        return True

    return WorkerPool(1, send, lambda: None, lambda _: None, end_timeout_s=end_timeout_s)


async def test_starting_a_worker_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the machine has no memory left, the main process must not end too."""
    started = asyncio.Event()

    async def start(*_: Any, pass_fds: tuple[int, ...], **__: Any) -> asyncio.subprocess.Process:
        if not started.is_set():
            started.set()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        # It must keep its end of the pipe open, or it counts as ended.
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


async def test_a_hanging_worker_does_not_outlive_the_main_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would keep its share of the port's connections and answer none of them."""
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 60\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    monkeypatch.setattr(processes, "SILENCE_S", 0.01)
    ending = asyncio.Event()
    workers = some_workers(end_timeout_s=60.0)
    end = workers._stop

    async def end_and_note(process: asyncio.subprocess.Process) -> None:
        asyncio.get_running_loop().call_later(0.05, ending.set)
        await end(process)

    monkeypatch.setattr(workers, "_stop", end_and_note)
    before = held()
    running = asyncio.create_task(workers.run(1))
    async with asyncio.timeout(START_TIMEOUT_S):
        await ending.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert held() == before


async def test_a_frame_in_two_parts_is_read_whole_however_late_the_second_part_is(
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
