"""A request with two legs at engines of other vendors, over three nodes of our agent.

Each engine is a stand-in (vendor_engine.py) that takes the real command line and the real fields of
its vendor. One suite holds all of them.
"""

import asyncio
import json
import re
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from isochrone.wire.engines.engine_capabilities import capabilities_of
from isochrone.wire.http import headers
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import DeviceId, Generation, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec, Role, Tombstone
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineCommand, EngineDriver, EngineLaunch
from tests.builders import a_spec
from tests.integration.nodeagent.test_data_plane import a_node
from tests.integration.nodeagent.test_two_legs import (
    NAMES,
    TwoLegs,
    is_stopped,
    is_warm,
    outcomes,
)
from tests.system.harness import until

PROGRAM: Final = Path(__file__).parent / "vendor_engine.py"
VENDORS: Final = (
    ("vllm", "nixl"),
    ("vllm", "mooncake"),
    ("sglang", "mooncake"),
    ("tensorrt_llm", "DEFAULT"),
)
PROMPT_TOKENS: Final = 200
TOKENS: Final = 24


class StandIn:
    """A driver that starts the stand-in with the command line of the real one."""

    def __init__(self, driver: EngineDriver, name: str, faults: Path) -> None:
        self._driver = driver
        self._name = name
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def missing(self) -> str:
        return ""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        command = self._driver.command(launch)
        names = {"REPLICA": launch.spec.replica_id, "FAULTS": str(self._faults)}
        names["PYTHONPATH"] = str(PROGRAM.parents[3])
        return msgspec.structs.replace(
            command,
            arguments=(sys.executable, str(PROGRAM), self._name, *command.arguments),
            environment={**command.environment, **names},
        )


class Vendor(NamedTuple):
    """The fleet of one vendor's engines, and the file with their faults."""

    legs: TwoLegs
    driver: str
    transfer: str
    faults: Path

    def break_replicas(self, **faults: str) -> None:
        self.faults.write_text(json.dumps(faults))

    async def external_tokens(self) -> int:
        """Return how many prompt tokens the decode engine got from others."""
        return await self.counted(0, r'"external_kv_transfer"\} (\d+)')

    async def counted(self, node: int, pattern: str) -> int:
        """Return a number on the page of metrics of a node's engine."""
        (replica,) = self.legs.nodes[node].supervisor.replicas.values()
        assert replica.engine is not None
        async with replica.engine.http.get("/metrics") as page:
            found = re.search(pattern, await page.text())
        assert found is not None
        return int(found[1])

    async def running(self) -> list[int]:
        """Return how many requests each engine runs."""
        return [await self.counted(node, r"running (\d+)") for node in range(len(NAMES))]


@pytest.fixture(params=VENDORS, ids=["-".join(vendor) for vendor in VENDORS])
async def vendor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Vendor]:
    name, transfer = request.param
    faults = tmp_path / "faults.json"
    faults.write_text("{}")
    monkeypatch.setitem(DRIVERS, name, StandIn(DRIVERS[name], name, faults))
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 20.0)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(a_node()) for _ in NAMES]
        for node, replica_id in zip(nodes, NAMES, strict=True):
            role = Role.DECODE if replica_id == "d" else Role.PREFILL
            spec = vendor_spec(name, transfer, replica_id, role)
            node.supervisor.start(msgspec.structs.replace(spec, artifact=node.artifact))
        for node in nodes:
            await until("warm", partial(is_warm, node), 60.0)
        yield Vendor(TwoLegs(nodes), name, transfer, faults)


def vendor_spec(driver: str, transfer: str, replica_id: str, role: Role) -> ReplicaSpec:
    engine = EngineSettings(
        driver=driver,
        kv_memory_bytes=1 << 20,
        tokens_in_flight_max=100_000,
        options={capabilities_of(driver).transfer_option: transfer},
    )
    spec = a_spec(replica_id, engine=engine, device_ids=(DeviceId("gpu0"),), context_tokens=512)
    return msgspec.structs.replace(spec, role=role)


def a_prompt() -> list[int]:
    return [secrets.randbelow(60) + 1 for _ in range(PROMPT_TOKENS)]


def text_of(prompt_text: str) -> list[str]:
    """Return the tokens of an answer without the digest of their prompt."""
    return [word.rpartition("-")[2] for word in prompt_text.split()]


async def test_two_legs_of_a_vendor_answer_as_one_engine_whatever_fails(vendor: Vendor) -> None:
    """One test, because starting nodes takes most of its time."""
    await check_answers(vendor)
    await check_cancel(vendor)
    await check_continuation(vendor)
    await check_failures(vendor)
    if not capabilities_of(vendor.driver).needs_prefill:
        await check_several_sequences(vendor)
    await check_drain(vendor)


async def check_answers(vendor: Vendor) -> None:
    legs, before = vendor.legs, outcomes().get("prefill", 0.0)
    whole = [str(number) for number in range(TOKENS)]
    expected = 0
    for stream in (False, True):
        answer = await legs.ask(a_prompt(), "p1", "p2", stream=stream)
        assert answer.heads[0] == "103"
        assert (answer.heads[1] in ("p1", "p2"), answer.heads[2:]) == (True, ["200"]), answer
        assert text_of(answer.text) == whole
        # The decode engine calls all of it cached; the prefill engine had nothing.
        assert answer.cached_tokens == 0
        expected += PROMPT_TOKENS
        assert await vendor.external_tokens() == expected
    assert outcomes()["prefill"] == before + 2
    await until("tokens are released", legs.is_idle, 10.0)


async def check_failures(vendor: Vendor) -> None:
    """A broken prefill replica costs a bounded time; then another one, or one engine, answers."""
    whole = [str(number) for number in range(TOKENS)]
    for fault in ("prefill_500", "prefill_hang", "prefill_garbage"):
        if fault == "prefill_garbage" and vendor.transfer == "mooncake":
            continue
        external = await vendor.external_tokens()
        with pytest.MonkeyPatch.context() as patch:
            if fault == "prefill_hang":
                patch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 1.0)
                patch.setattr("nodeagent.decide.requests.prefill_leg.ONLY_READER_TIMEOUT_S", 1.0)
            vendor.break_replicas(p1=fault, p2=fault)
            alone = await vendor.legs.ask(a_prompt(), "p1", "p2", stream=True)
        if capabilities_of(vendor.driver).needs_prefill:
            # Another replica of the deployment may have prefill replicas: the router tries it.
            assert (alone.heads[-1], alone.text) == ("503", ""), fault
        else:
            assert (alone.heads[-1], text_of(alone.text)) == ("200", whole), fault
            assert alone.heads[-2] == "d", "the router knows who read the prompt"
        assert await vendor.external_tokens() == external
    vendor.break_replicas(d="no_kv")
    answer = await vendor.legs.ask(a_prompt(), "p1")
    # vLLM computes what it cannot fetch. The others refuse, and the original request follows.
    expected = "503" if capabilities_of(vendor.driver).needs_prefill else "200"
    assert answer.heads[-1] == expected
    vendor.break_replicas(p1="prefill_dies")
    answer = await vendor.legs.ask(a_prompt(), "p1", "p2", stream=True)
    assert (answer.heads[-1], text_of(answer.text)) == ("200", whole)
    vendor.break_replicas()
    await until("tokens are released", vendor.legs.is_idle, 30.0)


async def check_cancel(vendor: Vendor) -> None:
    """A request whose router disconnects ends at both engines, whichever of them it waits for."""
    for slow in ("p1", "d"):
        vendor.break_replicas(**{slow: "prefill_hang"})
        asking = asyncio.create_task(vendor.legs.ask(a_prompt(), "p1", stream=True))

        async def is_begun(node: int = NAMES.index(slow)) -> bool:
            return (await vendor.running())[node] == 1

        await until(f"{slow} has its leg", is_begun, 30.0)
        asking.cancel()
        await asyncio.wait({asking})

        async def is_ended() -> bool:
            return await vendor.running() == [0, 0, 0]

        await until("both legs have ended", is_ended, 10.0)
    vendor.break_replicas()
    await until("tokens are released", vendor.legs.is_idle, 10.0)


async def check_drain(vendor: Vendor) -> None:
    """A replica of either role that is to end finishes its leg, and takes nothing more."""
    whole = [str(number) for number in range(TOKENS)]
    await until("p1 is warm again", partial(is_warm, vendor.legs.nodes[1]), 60.0)
    for victim, reader in (("p2", "p2"), ("d", "p1")):
        node = NAMES.index(victim)
        supervisor = vendor.legs.nodes[node].supervisor
        replica = supervisor.replicas[ReplicaId(victim)]
        # The decode engine is slow, too: it fetches the KV after its prefill leg has ended.
        vendor.break_replicas(**{"d": "slow", victim: "slow"})
        slowed, external = (
            await vendor.counted(node, r"slowed (\d+)"),
            await vendor.external_tokens(),
        )
        asking = asyncio.create_task(vendor.legs.ask(a_prompt(), reader, stream=True))

        async def is_begun(node: int = node, before: int = slowed) -> bool:
            return await vendor.counted(node, r"slowed (\d+)") > before

        await until(f"{victim} has its leg", is_begun, 30.0)
        tombstone = Tombstone(replica_id=ReplicaId(victim), generation=Generation(9), reason="test")
        supervisor.end(tombstone)
        answer = await asking
        assert (answer.heads[-2:], text_of(answer.text)) == ([reader, "200"], whole), victim
        if victim != "d":
            assert await vendor.external_tokens() == external + PROMPT_TOKENS
        await until("stopped", partial(is_stopped, replica), 60.0)
        late = await vendor.legs.ask(a_prompt(), reader)
        reads_alone = victim != "d" and not capabilities_of(vendor.driver).needs_prefill
        assert late.heads[-1] == ("200" if reads_alone else "503"), late
    vendor.break_replicas()
    await until("tokens are released", vendor.legs.is_idle, 10.0)


async def check_continuation(vendor: Vendor) -> None:
    """The rest of a broken stream has two legs only if its engine cannot read the prompt."""
    able = capabilities_of(vendor.driver)
    before = await vendor.external_tokens()
    named = format_peer_replicas(vendor.legs.peers("d", "p1"))
    sent = {headers.PREFILL_REPLICAS: named, headers.GENERATED_TOKENS: "3"}
    async with vendor.legs.nodes[0].ask("d", sent=sent) as response:
        assert response.status == (200 if able.resumes else 501)
        await response.read()
    assert (await vendor.external_tokens() > before) == able.needs_prefill


async def check_several_sequences(vendor: Vendor) -> None:
    """They are read where they are answered."""
    node = vendor.legs.nodes[0]
    before = await vendor.external_tokens()
    sent = {headers.PREFILL_REPLICAS: format_peer_replicas(vendor.legs.peers("d", "p1"))}
    async with node.ask("d", sent=sent, n=2) as response:
        assert response.status == 200
        await response.read()
    assert await vendor.external_tokens() == before
