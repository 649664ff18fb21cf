"""Engines that outlive a killed agent are found, adopted or cleaned up."""

import asyncio
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from isochrone.service.config import ConfigError
from isochrone.service.files import lock_state_folder
from isochrone.service.trust import identity as papers
from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.control import PeerRole
from nodeagent.app import serve
from nodeagent.bring_up import READY_AGAIN_S, note_ready, wait_ready
from nodeagent.config import NodeConfig
from nodeagent.drivers.driver import EngineCommand, EngineLaunch
from nodeagent.drivers.mock import MockDriver
from nodeagent.host import processes
from nodeagent.host.engines.engine_folder import SOCKET_NAME_BYTES
from nodeagent.host.engines.engine_log import last_error
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.host.processes import NICENESS, spawn
from tests.builders import a_spec
from tests.integration.service.test_tls import NOW, a_peer

ROOT = Path(__file__).parents[3]
READY_S = 30.0
AGENT = PeerRole.AGENT
SPEC = a_spec("r-left", engine=EngineSettings(driver="mock", kv_memory_bytes=1))
LIFE = """
import asyncio, os, signal, sys
from pathlib import Path
from nodeagent.host.engines import engine_process as engines
from tests.integration.nodeagent.test_survivors import SPEC

write_record = engines.write_record

def killed_before(folder, record):
    if bool(record.pid) == bool(int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGKILL)
    write_record(folder, record)

engines.write_record = killed_before
asyncio.run(engines.EngineProcesses(Path(sys.argv[1]), 1).start(SPEC, Path(sys.argv[1])))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    # The path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="left") as name:
        yield Path(name)


def killed(state: Path, *, started: bool) -> None:
    """Run an agent that is killed while it starts an engine, before it writes the record.

    `started`: killed after the engine process was started.
    """
    agent = subprocess.run(
        [sys.executable, "-c", LIFE, str(state), str(int(started))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=READY_S,
    )
    assert agent.returncode == -signal.SIGKILL


async def test_an_engine_whose_pid_was_not_recorded_is_adopted(
    folder: Path,
) -> None:
    await asyncio.to_thread(killed, folder, started=True)
    engines = EngineProcesses(folder, 1)
    (survivor,) = engines.survivors()
    assert survivor.spec == SPEC
    command = Path(f"/proc/{survivor.pid}/cmdline").read_bytes()
    assert str(folder / "r-left" / "config.json").encode() in command
    engine = engines.adopt(survivor)
    try:
        async with asyncio.timeout(READY_S):
            while not await engine.is_ready():
                await asyncio.sleep(0.05)
    finally:
        await engine.stop()
    assert not Path(f"/proc/{survivor.pid}/cmdline").exists() or is_zombie(survivor.pid)
    assert engines.survivors() == []


async def test_a_copied_state_folder_does_not_adopt_the_engine_of_a_running_agent(
    folder: Path,
) -> None:
    original, copy = folder / "a", folder / "b"
    original.mkdir()
    engine = await EngineProcesses(original / "engines", 1).start(SPEC, folder)
    try:
        shutil.copytree(original, copy, symlinks=True)
        with lock_state_folder(original):
            assert EngineProcesses(copy / "engines", 1).survivors() == []
            assert not (copy / "engines" / SPEC.replica_id).exists()
            assert not engine.exited.is_set()
        # With no agent there, the copy takes the engine over, as after a move to another disk.
        shutil.copytree(original, copy, symlinks=True, dirs_exist_ok=True)
        (survivor,) = EngineProcesses(copy / "engines", 1).survivors()
        assert survivor.pid == engine.pid
    finally:
        await engine.stop(kill=True)


async def no_memory_problem() -> str:
    return ""


async def test_an_engine_that_has_hung_while_no_agent_ran_is_not_waited_for_like_one_that_loads(
    folder: Path,
) -> None:
    """It stayed "loading" for load_timeout_s, half an hour, with no reason to be seen."""
    engine = await EngineProcesses(folder, 1).start(SPEC, folder)
    hung = None
    try:
        assert await wait_ready(engine, time.monotonic, READY_S, no_memory_problem) == ""
        await note_ready(engine)
        os.kill(engine.pid, signal.SIGSTOP)
        later = EngineProcesses(folder, 1)
        (survivor,) = later.survivors()
        hung = later.adopt(survivor)
        clock = itertools.count(0.0, READY_AGAIN_S)
        problem = await wait_ready(hung, clock.__next__, 1800.0, no_memory_problem)
        assert problem == "the engine was ready, and has not answered its agent for 60 s"
    finally:
        await engine.stop(kill=True)
        if hung is not None:
            await hung.release()


@pytest.mark.parametrize("keep_engines", [False, True])
async def test_an_agent_that_cannot_listen_stops_no_engine(
    folder: Path, keep_engines: bool
) -> None:
    """The port may be used by another agent of this node, which owns the engine."""
    papers.save_identity(folder, a_peer(Authority.create(folder / "ca", "test", NOW), "n1", AGENT))
    engine = await EngineProcesses(folder / "engines", 1).start(SPEC, folder)
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config = NodeConfig(
                name="n1",
                schedulers=("http://127.0.0.1:1",),
                state=folder,
                address="http://127.0.0.1:1",
                listen_port=taken.getsockname()[1],
                keep_engines_on_stop=keep_engines,
            )
            with pytest.raises(ConfigError, match="cannot listen"):
                await asyncio.to_thread(lambda: uvloop.run(serve(config, asyncio.Event())))
        assert not engine.exited.is_set()
        assert [record.pid for record in EngineProcesses(folder / "engines", 1).survivors()] == [
            engine.pid
        ]
    finally:
        await engine.stop(kill=True)


@pytest.mark.parametrize(("device", "niceness"), [("cpu", NICENESS), ("gpu0", 0)])
async def test_an_engine_on_processors_has_a_lower_priority_than_its_agent(
    folder: Path, device: str, niceness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "NICENESS", NICENESS)
    spec = a_spec("r-left", engine=SPEC.engine, device_ids=(DeviceId(device),))
    engine = await EngineProcesses(folder / "engines", 1).start(spec, folder)
    try:
        assert os.getpriority(os.PRIO_PROCESS, engine.pid) == niceness
        group = Path(f"/proc/{engine.pid}/autogroup")
        if group.exists():
            assert group.read_text().endswith(f" nice {niceness}\n")
    finally:
        await engine.stop(kill=True)


async def test_the_signal_that_killed_an_engine_is_reported(folder: Path) -> None:
    """The kernel kills an engine that runs out of memory, and the log does not say so."""
    engine = await EngineProcesses(folder / "engines", 1).start(SPEC, folder)
    try:
        os.kill(engine.pid, signal.SIGKILL)
        await engine.exited.wait()
        assert engine.exit_reason == "the engine was killed by SIGKILL"
    finally:
        await engine.stop(kill=True)


@pytest.mark.parametrize("letters", [1, 100])
async def test_temporary_files_of_a_killed_engine_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, letters: int
) -> None:
    """By the next agent, if the engine and its agent were killed. vLLM leaves sockets so."""
    temporary = folder / "elsewhere"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    spec = msgspec.structs.replace(SPEC, replica_id=ReplicaId("r" * letters))
    engines = folder / "engines"
    monkeypatch.setattr(MockDriver, "command", sleeping)
    engine = await EngineProcesses(engines, 1).start(spec, folder)
    try:
        (variable,) = (
            variable
            for variable in Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
            if variable.startswith(b"TMPDIR=")
        )
        own = Path(os.fsdecode(variable[len(b"TMPDIR=") :]))
        assert own.is_relative_to(engines) == (letters == 1)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(own / ("s" * SOCKET_NAME_BYTES)))
        os.kill(engine.pid, signal.SIGKILL)
        await engine.exited.wait()
        await engine.release()
        assert EngineProcesses(engines, 1).survivors() == []
        assert list(engines.iterdir()) == []
        assert [path.name for path in temporary.iterdir()] == [f"torchinductor_{os.getuid()}"]
    finally:
        await engine.stop(kill=True)


def sleeping(_: MockDriver, launch: EngineLaunch) -> EngineCommand:
    return EngineCommand(arguments=("sleep", "3600"), base_url=f"http://127.0.0.1:{launch.port}")


@pytest.mark.parametrize(("boot", "signals"), [("an earlier one", 0), ("", 1)])
def test_a_pid_of_an_earlier_boot_is_not_signalled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, boot: str, signals: int
) -> None:
    left = folder / "r-left"
    left.mkdir()
    leader = subprocess.Popen(["true"])
    leader.wait(READY_S)
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    command = EngineCommand(arguments=("x",), base_url="http://localhost")
    record = EngineRecord(pid=leader.pid, started=1, boot=boot, command=command, spec=SPEC)
    (left / "process.json").write_bytes(msgspec.json.encode(record))
    assert EngineProcesses(folder, 1).survivors() == []
    assert signalled == [leader.pid] * signals
    assert not left.exists()


async def test_an_engine_starts_even_if_no_standby_process_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> subprocess.Popen[bytes]:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("nodeagent.host.engines.standby.spawn", fails)
    monkeypatch.setattr(MockDriver, "has_standby", True)
    engines = EngineProcesses(folder, 1, standby=True)
    engine = await engines.start(SPEC, folder)
    try:
        assert [record.pid for record in engines.survivors()] == [engine.pid]
    finally:
        await engine.stop(kill=True)
        await engines.close()


def test_the_last_error_of_a_huge_log_is_found(folder: Path) -> None:
    log_path = folder / "engine.log"
    assert last_error(log_path) == ""
    log_path.write_text("out of memory\n\n")
    assert last_error(log_path) == "out of memory"
    with log_path.open("r+b") as file:
        file.truncate(1 << 36)
        file.seek(0, os.SEEK_END)
        file.write(b"\ncannot go on\n")
    assert last_error(log_path) == "cannot go on"


def test_an_error_in_the_log_comes_before_later_lines(folder: Path) -> None:
    log_path = folder / "engine.log"
    lines = (
        "(EngineCore pid=7) ValueError: Available memory is less than requested",
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
        "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
    )
    log_path.write_text("\n".join(lines))
    assert last_error(log_path) == lines[0]
    log_path.write_text("\n".join(lines[1:]))
    assert last_error(log_path).startswith(lines[1])
    log_path.write_text("\x1b[1;31mValueError:\x1b[0m no \x9b2Jsuch\x07 model\n")
    assert last_error(log_path) == "ValueError: no 2Jsuch model"


async def test_an_engine_that_never_started_leaves_nothing(folder: Path) -> None:
    await asyncio.to_thread(killed, folder, started=False)
    assert EngineProcesses(folder, 1).survivors() == []


async def test_children_of_an_exited_engine_are_killed(folder: Path) -> None:
    log = folder / "engine.log"
    leader = processes.spawn(("sh", "-c", "sleep 60 & echo $!"), log)
    # It has exited and was not reaped yet.
    await asyncio.to_thread(os.waitid, os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    processes.signal_group(leader.pid, processes.start_time(leader.pid), signal.SIGKILL)
    child = int(log.read_text())
    async with asyncio.timeout(READY_S):
        while Path(f"/proc/{child}/cmdline").exists() and not is_zombie(child):
            await asyncio.sleep(0.05)
    assert not processes.is_alive(leader.pid, processes.start_time(leader.pid))
    assert leader.wait() == 0


async def test_children_of_an_engine_without_a_recorded_pid_are_killed(folder: Path) -> None:
    left = folder / "r-left"
    left.mkdir()
    command = EngineCommand(arguments=("x",), base_url="http://localhost")
    record = EngineRecord(command=command, spec=SPEC)
    (left / "process.json").write_bytes(msgspec.json.encode(record))
    with (left / "engine.log").open("wb") as out:
        leader = await asyncio.create_subprocess_exec(
            *("sh", "-c", "sleep 60 & echo $!"), start_new_session=True, stdout=out
        )
    await leader.wait()
    child = int((left / "engine.log").read_text())
    assert EngineProcesses(folder, 1).survivors() == []
    async with asyncio.timeout(READY_S):
        while not is_zombie(child):
            await asyncio.sleep(0.02)
    assert not left.exists()


@pytest.mark.parametrize("record", [b"{", b'{"boot":"\xff"}'], ids=["cut", "not UTF-8"])
async def test_an_engine_with_an_unreadable_record_is_killed(folder: Path, record: bytes) -> None:
    left = folder / "r-left"
    left.mkdir()
    (left / "process.json").write_bytes(record)
    leader = processes.spawn(("sleep", "60"), left / "engine.log")
    child = processes.spawn(("sleep", "60"), left / "engine.log")
    apart = processes.spawn(("sleep", "60"), folder / "other.log", {})
    assert EngineProcesses(folder, 1).survivors() == []
    try:
        for process in (leader, child):
            assert await asyncio.to_thread(process.wait, READY_S) == -signal.SIGKILL
        assert apart.poll() is None
    finally:
        for process in (leader, child, apart):
            process.kill()
            process.wait()
    assert not left.exists()


def is_zombie(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_error_names_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot start vllm-of-nowhere: it is not on the PATH"):
        spawn(("vllm-of-nowhere", "serve"), tmp_path / "log")
