"""Engines that fail in every way that we know, beside a good one that must not notice.

All run at once on one node, with the agent's own supervisor and data plane. A stand-in program
(bad_engine.py) takes the place of vLLM's.
"""

import asyncio
import os
import random
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from isochrone.wire.ids import DeviceId, Generation, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas import health
from nodeagent.drivers.driver import DeviceMemory
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines import engine_log
from nodeagent.host.engines import engine_process as engines
from nodeagent.host.engines.engine_ports import free_port
from nodeagent.host.engines.engine_process import EngineProcess, EngineProcesses
from nodeagent.supervisor import Supervisor
from tests.builders import a_spec
from tests.system.harness import until

PROGRAM: Final = Path(__file__).parent / "bad_engine.py"
MIB: Final = 1 << 20
LIMIT_S: Final = 90.0
CANARY_TIMEOUT_S: Final = 5.0
GOOD: Final = ReplicaId("good")
PLANNED_BYTES: Final = 64 * MIB
NODE_BYTES: Final = 1 << 40
LOG_BYTES: Final = 256 * 1024

REASONS: Final = {
    "never-ready": r"the engine was not ready after 6 s; .* raise load_timeout_s",
    "garbage": r"ready and gives no answer: status 200 without 'choices': '\\x00 no answer'",
    "hang": r"1 requests in flight and no token for \d+ s",
    "grow": r"takes \d+ MiB of 64 planned: raise the extra_bytes of its model",
    "no-memory": r"exited with status 1 while loading: torch.OutOfMemoryError: CUDA out of memory",
    "unloadable": r"with status 1 while loading: safetensors_rust.SafetensorError: Error while",
    "unknown-option": r"status 1 while loading: vllm serve: error: unrecognized .*--new-option",
    "silent": r"the engine exited with status 3 while loading$",
    "killed": r"killed by SIGKILL while loading, as the kernel does when memory is short",
    "forks": r"killed by SIGKILL.*, as the kernel does when memory is short",
    "later-garbage": r"3 canary requests in a row failed: status 200 without 'choices': '\\x00",
    "errors": r"3 canary requests in a row failed: status 500: .*EngineDeadError",
    "same-port": r"port \d+ of the engine is also used by process \d+ \(",
}
"""By fault: what `explain` says of its replica."""


class Node:
    """A supervisor, the reasons that its replicas gave, and the ports that its engines got."""

    def __init__(self, folder: Path, stall_s: float = 2.0) -> None:
        self.reasons: dict[str, set[str]] = defaultdict(set)
        self.states: dict[str, set[ReplicaState]] = defaultdict(set)
        devices = DeviceReader(0, open_nvml=lambda: None)
        config = NodeConfig(
            name="n1",
            schedulers=(),
            state=folder,
            address="",
            load_timeout_s=6.0,
            stall_s=stall_s,
            canary_interval_s=1.0,
            canary_timeout_s=CANARY_TIMEOUT_S,
        )
        artifacts: Any = Artifacts(folder)
        self.supervisor = Supervisor(
            config=config,
            artifacts=artifacts,
            engines=EngineProcesses(folder / "engines", 1, canary_timeout_s=CANARY_TIMEOUT_S),
            clock=time.monotonic,
            rng=random.Random(1),
            on_change=self.note_reasons,
            memory_used=devices.used_by,
            # The machine of the test has memory: say that there is none left.
            device_memory=no_memory_left,
        )

    def note_reasons(self) -> None:
        for replica_id, replica in self.supervisor.replicas.items():
            self.reasons[replica_id].add(replica.report().reason)
            self.states[replica_id].add(replica.state)

    def start(self, name: str) -> None:
        engine = EngineSettings(driver="vllm", kv_memory_bytes=MIB, tokens_in_flight_max=32_768)
        spec = a_spec(name, engine=engine, device_ids=(DeviceId("cpu"),))
        spec = msgspec.structs.replace(spec, name=name, memory_bytes=PLANNED_BYTES)
        self.supervisor.start(spec)

    def state(self, name: str) -> ReplicaState:
        return self.supervisor.states()[ReplicaId(name)]

    def engine(self, name: str) -> EngineProcess:
        engine = self.supervisor.replicas[ReplicaId(name)].engine
        assert engine is not None
        return engine

    async def warm(self, name: str) -> None:
        await self.until(f"{name} is warm", lambda: self.state(name) is ReplicaState.WARM)

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        async def condition() -> bool:
            self.note_reasons()
            return holds()

        await until(f"{what}: {dict(self.reasons)}", condition, LIMIT_S)

    async def ask(self, name: str) -> str:
        """Send a request as the data plane does, and return the answer's text."""
        replica = self.supervisor.replicas[ReplicaId(name)]
        reservation = replica.admission.admit(10, 10)
        assert reservation is not None
        body = {"messages": [], "max_tokens": 5}
        try:
            url = "/v1/chat/completions"
            async with self.engine(name).http.post(url, json=body) as response:
                fields = await response.json()
                return str(fields["choices"][0]["message"]["content"])
        finally:
            reservation.release()

    async def end_all(self) -> None:
        for replica_id in list(self.supervisor.replicas):
            tombstone = Tombstone(
                replica_id=replica_id, generation=Generation(2), reason="", drain_timeout_s=0.0
            )
            self.supervisor.end(tombstone)
        replicas = self.supervisor.states
        await self.until(
            "all have stopped", lambda: set(replicas().values()) == {ReplicaState.STOPPED}
        )


class Artifacts:
    """In place of an artifact store: all models are one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def ensure(self, *_: object) -> Path:
        return self._folder


def no_memory_left(_devices: Sequence[DeviceId]) -> DeviceMemory:
    return DeviceMemory(total_bytes=NODE_BYTES, free_bytes=0)


def processes_of_engines() -> list[str]:
    """Return the command lines of all stand-ins and of their children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(PROGRAM) in line:
            found.append(line)
    return found


@pytest.fixture
async def bad_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on the PATH as vLLM, and shorten limits."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = commands / "vllm"
    line = shlex.join([sys.executable, str(PROGRAM)])
    script.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(engines, "TERM_TIMEOUT_S", 1.0)
    monkeypatch.setattr(engine_log, "LOG_BYTES_MAX", LOG_BYTES)


@pytest.fixture
async def node(bad_vllm: None, tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.supervisor.shut_down(keep_engines=False)


async def test_no_failing_engine_disturbs_its_neighbour(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start(GOOD)
    await node.warm(GOOD)
    good = node.engine(GOOD)
    port = good.record.command.port
    ports = iter([port])
    monkeypatch.setattr(engines, "free_port", lambda taken: next(ports, 0) or free_port(taken))
    node.start("same-port")
    await node.until("it has another port", lambda: node.state("same-port") is ReplicaState.WARM)
    assert node.engine("same-port").record.command.port != port

    for fault in (*REASONS.keys() - {"same-port"}, "noisy", "stubborn", "no-template"):
        node.start(fault)
    await node.warm("hang")
    hanging = asyncio.create_task(node.ask("hang"))

    def lacking() -> list[str]:
        return [
            fault
            for fault, pattern in REASONS.items()
            if not any(re.search(pattern, reason) for reason in node.reasons[fault])
        ]

    await node.until("each fault is explained", lambda: not lacking())
    await asyncio.gather(hanging, return_exceptions=True)
    for fault in ("noisy", "stubborn", "same-port"):
        await node.warm(fault)
        assert await node.ask(fault) == f"by {fault}"
    # A base model answers 400 to chats, and works.
    await node.warm("no-template")
    assert await node.engine("no-template").canary("chat")
    assert node.supervisor.replicas[ReplicaId("no-template")].failure_times == []

    assert node.engine(GOOD) is good
    assert node.supervisor.replicas[GOOD].failure_times == []
    assert await node.ask(GOOD) == "by good"
    assert any("serve" in line for line in processes_of_engines())
    await node.end_all()
    await node.until("no process is left", lambda: not processes_of_engines())


async def test_an_engine_that_hangs_and_loses_its_requests_is_killed(
    bad_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers take silent streams elsewhere long before `stall_s`; then no request is in flight."""
    seen = [health.EngineWatch()]
    observe = health.observe

    def recorded(watch: health.EngineWatch, **values: Any) -> health.EngineWatch:
        seen.append(observe(watch, **values))
        return seen[-1]

    monkeypatch.setattr(health, "observe", recorded)
    node = Node(tmp_path, stall_s=3600.0)
    try:
        node.start("hang")
        await node.warm("hang")
        hung = node.engine("hang")
        hanging = asyncio.create_task(node.ask("hang"))
        await node.until("it is silent", lambda: seen[-1].stalled >= health.SUSPECT_STALLED_MIN)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        pattern = r"its requests left without a token.*: a test request was not answered within 5 s"
        await node.until(
            "it was killed",
            lambda: any(re.search(pattern, reason) for reason in node.reasons["hang"]),
        )
        await node.warm("hang")
        assert node.engine("hang") is not hung
        assert hung.exited.is_set()
        assert await node.engine("hang").canary("chat")
        assert len(node.supervisor.replicas[ReplicaId("hang")].failure_times) == 1
    finally:
        await node.supervisor.shut_down(keep_engines=False)
    assert not processes_of_engines()


async def test_an_engine_that_fails_at_its_first_token_is_never_warm(node: Node) -> None:
    """As with weights that are no numbers. It was published, served errors, and started again."""
    node.start("broken-weights")
    pattern = r"status 500: .*no finite logits"
    await node.until(
        "it is explained",
        lambda: any(re.search(pattern, reason) for reason in node.reasons["broken-weights"]),
    )
    assert ReplicaState.WARM not in node.states["broken-weights"]


async def test_an_engine_that_ignores_sigterm_is_killed_and_the_agent_says_so(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("stubborn", GOOD):
        node.start(name)
        await node.warm(name)
    await node.end_all()
    assert not processes_of_engines()
    killed = [vars(record)["fields"] for record in caplog.records if "SIGTERM" in record.message]
    assert killed == [{"replica": "stubborn", "after_s": 1.0}]


async def test_the_log_of_a_noisy_engine_stays_short(node: Node) -> None:
    node.start("noisy")
    await node.warm("noisy")
    log = node.engine("noisy").log
    sizes = [0]

    def is_trimmed() -> bool:
        sizes.append(log.stat().st_size)
        return sizes[-1] < sizes[-2] and max(sizes) > LOG_BYTES

    await node.until("the log was trimmed", is_trimmed)
    assert node.state("noisy") is ReplicaState.WARM


def test_a_port_is_given_to_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port(())
    assert free_port({first}) != first
    with pytest.raises(OSError, match="cannot find a port"):
        free_port(range(1 << 16))
