"""Attacks a fleet with a stolen certificate of a router or a node.

    python -m ops.attack.stolen_certificates [--seconds 15]

Starts a fleet of two nodes and two routers. A thief registers with a certificate of its own, as one
that was stolen, and sends what no router or node would: use of a key and numbers at the ends of
their types. Prints for each attack how often the other routers lost their scheduler, how many of a
victim's requests failed meanwhile, how old the oldest sign of life of a node in the store is
afterwards, and by how much the scheduler's memory grew.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from isochrone.service.trust import identity as identities
from isochrone.service.trust.joining import join
from isochrone.wire import codec
from isochrone.wire.client_keys.key_use import (
    KEY_USE,
    KEY_USE_ROWS_MAX,
    FleetKeyUse,
    KeyUse,
)
from isochrone.wire.ids import BootId, Epoch, Generation, KeyId, NodeId, PopId, RouterId
from isochrone.wire.peers.control import (
    PeerRole,
    Register,
    ToAgent,
    ToRouter,
    Welcome,
    register_payload,
)
from isochrone.wire.peers.report import Pulse
from isochrone.wire.peers.suspicions import (
    SUSPICION_ROWS_MAX,
    SUSPICIONS,
    FleetLoss,
    FleetSuspicions,
)
from isochrone.wire.peers.usage import Demand, DemandRow, RoundTrip, RoundTrips
from ops.attack.control_port_strangers import memory_kib
from tests.builders import a_device, a_report
from tests.system.harness import CITIES, Fleet, a_fleet

POP = "ams"
ENDS = (-(2**63), -1, 0, 2**63 - 1, 2**64 - 1)
"""Integers at the ends of what a message can have."""

FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 1e308)
PROBE_PAUSE_S = 0.2
SEND_PAUSE_S = 0.05
RETRY_S = 0.2

Messages = Iterable[msgspec.Struct]


class Thief:
    """A peer with a valid certificate that registers again whenever it is refused."""

    def __init__(self, fleet: Fleet, role: PeerRole) -> None:
        self._fleet = fleet
        self.role = role
        self.name = f"thief-{role.value}"
        self.boot_id = BootId("thief-boot")
        self._url = f"http://127.0.0.1:{fleet.ports['control-a']}"
        self.sent = self.refused = 0

    async def join(self) -> None:
        """Get a certificate."""
        body = {"pop": POP, "role": self.role.value}
        token = (await self._fleet.ask("POST", "/v1/join-tokens", body))["token"]
        folder = self._fleet.folder / self.name
        self._identity = await join(
            urls=[self._url], token=token, role=self.role, name=self.name, folder=folder
        )

    @asynccontextmanager
    async def _connected(
        self, http: aiohttp.ClientSession
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        reader = codec.decoder(ToAgent if self.role is PeerRole.AGENT else ToRouter)
        async with http.ws_connect(f"{self._url}/v1/{self.role.value}", max_msg_size=0) as socket:
            challenge = codec.decode(await socket.receive_bytes(), reader)
            payload = register_payload(
                cluster_id=challenge.cluster_id,
                nonce=challenge.nonce,
                name=self.name,
                boot_id=self.boot_id,
            )
            register = Register(
                protocol=codec.PROTOCOL,
                role=self.role,
                name=self.name,
                pop=PopId(POP),
                boot_id=self.boot_id,
                certificate_pem=self._identity.certificate_pem,
                signature=identities.sign(self._identity.key_pem, payload),
                cluster_id=challenge.cluster_id,
                generation=Generation(0),
                epoch=Epoch(0),
                capabilities=(KEY_USE, SUSPICIONS),
            )
            await socket.send_bytes(codec.encode(register))
            while not isinstance(codec.decode(await socket.receive_bytes(), reader), Welcome):
                pass
            yield socket

    async def send_for(self, seconds: float, make: Callable[[], Messages]) -> None:
        """Send messages for some seconds, and read nothing that matters."""
        messages = iter(make())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), aiohttp.ClientSession() as http:
                while True:
                    with suppress(aiohttp.ClientError, TypeError, codec.MalformedFrame):
                        async with self._connected(http) as socket:
                            messages = await self._send(socket, messages, make)
                    self.refused += 1
                    await asyncio.sleep(RETRY_S)

    async def _send(self, socket: Any, messages: Any, make: Callable[[], Messages]) -> Any:
        """Send one message after the other until the connection ends."""
        while not socket.closed:
            message = next(messages, None)
            if message is None:
                messages = iter(make())
                continue
            await socket.send_bytes(codec.encode(message))
            self.sent += 1
            await asyncio.sleep(SEND_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await socket.receive()
        return messages


class Found(NamedTuple):
    """What an attack did."""

    attack: str
    sent: int
    refused: int
    reconnected: int
    asked: int
    failed: int
    failed_after: int
    oldest_pulse_s: float
    grown_mib: float


def key_use(key_id: str) -> Callable[[], Messages]:
    """Return messages that say that a key was used as much as they may say, twice.

    The scheduler adds them up.
    """
    row = KeyUse(KeyId(key_id), 10**9, 10**12)
    return lambda: [FleetKeyUse((row, row))]


def many_names() -> Messages:
    """Return messages about keys that do not exist, with names as long as the frame has room."""
    names = (f"{'k' * 3900}{number}" for number in range(KEY_USE_ROWS_MAX))
    return [FleetKeyUse(tuple(KeyUse(KeyId(name), 1, 1) for name in names))]


def suspicions() -> Messages:
    """Return messages about engines that were never lost."""
    for turn in range(1000):
        losses = tuple(
            FleetLoss((turn << 16 | number).to_bytes(8, "big"), "demo", f"r{number}", 0.0, 0.0)
            for number in range(SUSPICION_ROWS_MAX)
        )
        yield FleetSuspicions(losses=losses)


def demand(thief: Thief) -> Callable[[], Messages]:
    """Return demand and round trips with numbers at the ends of their types."""

    def make() -> Messages:
        for seq in ENDS:
            for count in ENDS:
                row = DemandRow(deployment_id="mock", pop=POP, requests=count, prompt_tokens=count)  # type: ignore[arg-type]
                for number in FLOATS:
                    yield Demand(
                        router_id=RouterId(thief.name),
                        boot_id=thief.boot_id,
                        seq=seq,
                        window_s=number,
                        rows=(row,),
                        age_s=number,
                        table_generation=Generation(count),
                        sent_at=number,
                    )
        for number in FLOATS:
            rows = tuple(RoundTrip(node_id=NodeId(f"{pop}-1"), rtt_ms=number) for pop in CITIES)
            yield RoundTrips(router_id=RouterId(thief.name), rows=rows)

    return make


def pulses(thief: Thief) -> Callable[[], Messages]:
    """Return pulses with numbers at the ends of their types."""

    def make() -> Messages:
        for generation in ENDS:
            for sent_at in FLOATS:
                yield Pulse(
                    node_id=NodeId(thief.name),
                    boot_id=thief.boot_id,
                    seq=generation,
                    generation=Generation(generation),
                    assignment_refusal="\0" * 500,
                    sent_at=sent_at,
                )

    return make


def reports(thief: Thief) -> Callable[[], Messages]:
    """Return reports of which one field after the other is at the ends of its type."""

    def make() -> Messages:
        for seq, value in enumerate((*ENDS, 2**53, 2**62)):
            device = msgspec.structs.replace(a_device(), memory_bytes=value)
            whole = a_report(thief.name, seq=seq + 1, devices=(device,))
            yield msgspec.structs.replace(whole, boot_id=thief.boot_id)
            for field in ("disk_free_bytes", "generation", "epoch"):
                whole = a_report(thief.name, seq=seq + 1)
                yield msgspec.structs.replace(whole, boot_id=thief.boot_id, **{field: value})

    return make


async def oldest_pulse_s(fleet: Fleet) -> float:
    """Return for how long the longest silent of the fleet's own nodes is silent, as stored."""
    rows = (await fleet.ask("GET", "/v1/nodes"))["data"]
    return max(float(row["silent_s"]) for row in rows if not row["node_id"].startswith("thief"))


def registrations(fleet: Fleet) -> int:
    """Count how often the fleet's routers have registered at a scheduler."""
    logs = [fleet.folder / "logs" / f"router-{pop}.log" for pop in CITIES]
    return sum(log.read_text().count('"registered"') for log in logs)


class Victim:
    """A tenant whose key has limits."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self._fleet, self._key = fleet, key
        self.asked = self.failed = 0

    async def ask(self, http: aiohttp.ClientSession) -> None:
        """Send a short request to each router."""
        body = {"model": "mock", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for pop in CITIES:
            url = f"{self._fleet.endpoint(pop)}/v1/chat/completions"
            sent = {"authorization": f"Bearer {self._key}"}
            async with http.post(url, json=body, headers=sent) as response:
                await response.read()
                self.asked += 1
                self.failed += response.status != 200

    async def go_on(self) -> None:
        """Send requests until cancelled."""
        async with aiohttp.ClientSession() as http:
            while True:
                await self.ask(http)
                await asyncio.sleep(PROBE_PAUSE_S)


async def attack(
    fleet: Fleet, name: str, thief: Thief, victim: Victim, make: Callable[[], Messages], s: float
) -> Found:
    """Send what `make` returns for `s` seconds while a victim's requests go on."""
    pid = fleet.processes.pid("scheduler-a")
    before_kib, before = memory_kib(pid, "VmRSS"), registrations(fleet)
    thief.sent = thief.refused = victim.asked = victim.failed = 0
    asking = asyncio.create_task(victim.go_on())
    await thief.send_for(s, make)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    grown_mib = (memory_kib(pid, "VmRSS") - before_kib) / 1024
    asked, failed = victim.asked, victim.failed
    await asyncio.sleep(3.0)
    victim.failed = 0
    async with aiohttp.ClientSession() as http:
        for _ in range(5):
            await victim.ask(http)
    return Found(
        name,
        thief.sent,
        thief.refused,
        registrations(fleet) - before,
        asked,
        failed,
        victim.failed,
        await oldest_pulse_s(fleet),
        grown_mib,
    )


async def run(seconds: float) -> list[Found]:
    """Run each attack on one fleet."""
    async with a_fleet() as fleet:
        await fleet.deploy(replicas=2)
        limits = {"requests_per_min": 6000, "tokens_per_min": 10_000_000}
        made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "victim", "limits": limits})
        await fleet.routers_know()
        victim = Victim(fleet, made["key"])
        router, node = Thief(fleet, PeerRole.ROUTER), Thief(fleet, PeerRole.AGENT)
        await router.join()
        await node.join()
        rounds: list[tuple[str, Thief, Callable[[], Messages]]] = [
            ("router: long names of keys", router, many_names),
            ("router: suspicions", router, suspicions),
            ("router: demand at the ends", router, demand(router)),
            ("node: pulses at the ends", node, pulses(node)),
            ("node: reports at the ends", node, reports(node)),
            ("router: use of a key", router, key_use(made["key_id"])),
        ]
        return [
            await attack(fleet, name, thief, victim, make, seconds) for name, thief, make in rounds
        ]


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    for found in asyncio.run(run(parser.parse_args().seconds)):
        print(
            f"{found.attack}: {found.sent} messages, {found.refused} times disconnected; routers"
            f" registered again {found.reconnected} times; {found.failed} of {found.asked} requests"
            f" of the victim failed, {found.failed_after} of 10 afterwards; oldest pulse"
            f" {found.oldest_pulse_s:.0f} s; scheduler {found.grown_mib:+.0f} MiB"
        )


if __name__ == "__main__":
    main()
