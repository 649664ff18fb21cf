"""Holds the simulated store to the real SQL: the same calls in both, with the same answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
import pytest

from isochrone.wire.admin import PopBody
from isochrone.wire.ids import BootId, ClusterId, DeploymentId, Epoch, Generation, NodeId, PopId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import Pulse, Refusal, ReplicaProfile
from scheduler.decide.cluster import PlacementPlan, ReplicaEnding, ReplicaStart
from scheduler.decide.membership import NodeContact
from scheduler.store import catalogue, cluster, deployments, lease
from scheduler.store.accounts import keys
from scheduler.store.fleet import node_losses, nodes, plans
from scheduler.store.fleet.identities import add_peer
from scheduler.store.fleet.nodes import UnknownPeer
from scheduler.store.lease import EpochLost, acquire_or_renew_lease, ensure_cluster
from scheduler.store.pool import Pool, transaction
from tests.builders import (
    GIB,
    a_certificate,
    a_deployment,
    a_device,
    a_model,
    a_pop,
    a_replica_report,
    a_report,
    a_spec,
)
from tests.simulation import store_functions, store_lease
from tests.simulation.event_loop import SimLoop
from tests.simulation.network import Network
from tests.simulation.store import NodeRow, SimPool, SimStore

pytestmark = pytest.mark.usefixtures("server_older_than_a_lease")

STEPS: Final = 120
HEARD: Final = NodeContact(acting_for_s=1000.0)
REPLICAS: Final = ("r1", "r2", "r3", "r4")
NODES: Final = ("n1", "n2", "n3")
STATES: Final = ("loading", "warm", "failed", "draining", "stopped")


class Call(NamedTuple):
    """One call of a store function, by its name."""

    name: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012


class RealStore:
    """Finds the real functions by name."""

    def __getattr__(self, name: str) -> Any:
        for module in (lease, nodes, plans, cluster, keys, node_losses):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


class Script:
    """Draws calls, each from what the calls before have answered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epoch, self.generation = Epoch(1), Generation(1)
        self.seqs = dict.fromkeys(NODES, 0)

    def next_call(self) -> Call:
        rng = self.rng
        draw = rng.choice(
            (
                *(self._report,) * 6,
                *(self._plan,) * 3,
                *(self._register, self._lease, self._routes, self._loss, self._pulse, self._raise),
            )
        )
        return draw()

    def _lease(self) -> Call:
        name = self.rng.choice(("acquire_or_renew_lease", "renew_lease", "release_lease"))
        return Call(name, (self.rng.choice(("s1", "s2")),))

    def _register(self) -> Call:
        node, boot = (
            self.rng.choice(NODES),
            BootId(self.rng.choice(("boot-1", "boot-1", "boot-1", "boot-2"))),
        )
        certificate = a_certificate(node)
        arguments = (PeerRole.AGENT, node, boot, Generation(0), certificate, "0.1.0")
        return Call("record_registration", arguments)

    def _report(self) -> Call:
        rng, node = self.rng, self.rng.choice(NODES)
        self.seqs[node] += rng.choice((1, 1, 1, 0))
        replicas = []
        for name in rng.sample(REPLICAS, rng.randrange(4)):
            replica = a_replica_report(self._spec(name), rng.choice(STATES))
            profile = ReplicaProfile(load_s=1.0, decode_tokens_per_s=9.0)
            fields: dict[str, Any] = {"restarts": rng.randrange(3), "profile": profile}
            replicas.append(msgspec.structs.replace(replica, reason=rng.choice("xy"), **fields))
        refused = rng.sample(REPLICAS, rng.choice((0, 0, 1)))
        report = a_report(
            node,
            self.seqs[node],
            boot_id=BootId("boot-1"),
            generation=self.generation,
            devices=(a_device(3.0),),
            lacking_engines=rng.choice(({}, {"vllm": "it is not installed"})),
            replicas=tuple(replicas),
            refusals=tuple(
                Refusal(replica_id=self._spec(name).replica_id, reason="no", deployment_id=D)
                for name in refused
            ),
        )
        sealed = rng.random() < 0.8
        return Call("record_report", (self._epoch(), report, lambda node_id, spec: sealed))

    def _plan(self) -> Call:
        rng = self.rng
        starts, endings = [], []
        node = NodeId(rng.choice(NODES))
        if rng.random() < 0.6:
            spec = self._spec(rng.choice(REPLICAS))
            starts.append(ReplicaStart(node_id=node, spec=spec, reason="test"))
        else:
            name = self._spec(rng.choice(REPLICAS)).replica_id
            endings.append(ReplicaEnding(replica_id=name, node_id=node, reason="test"))
        based_on = self.generation if rng.random() < 0.9 else Generation(1)
        plan = PlacementPlan(based_on=based_on, starts=tuple(starts), endings=tuple(endings))
        return Call("commit_plan", (plan, self._epoch()))

    def _routes(self) -> Call:
        return Call("next_route_generation", (self._epoch(), Generation(self.rng.randrange(60))))

    def _loss(self) -> Call:
        (node,) = self.rng.sample([_fleet_node(name) for name in NODES], 1)
        lost, back = self.rng.choice((([node], []), ([], [(node, 1.0)])))
        return Call("record_node_losses", (self._epoch(), lost, back))

    def _pulse(self) -> Call:
        node = NodeId(self.rng.choice(NODES))
        pulse = Pulse(node_id=node, boot_id=BootId("boot-1"), seq=1, generation=self.generation)
        return Call("record_pulses", ([pulse],))

    def _raise(self) -> Call:
        counters = {
            "holder": self.rng.choice(("s1", "s2")),
            "generation": Generation(self.generation + self.rng.choice((-3, 0, 2))),
            "epoch": Epoch(self.epoch + self.rng.choice((-1, 0, 1))),
        }
        return Call("raise_epoch_and_generation", (), counters)

    def _epoch(self) -> Epoch:
        return Epoch(self.epoch - (self.rng.random() < 0.1))

    def _spec(self, name: str) -> Any:
        return a_spec(name, memory_bytes=int(1.25 * GIB))


D: Final = DeploymentId("d")


def _fleet_node(name: str) -> Any:
    from tests.builders import a_node

    return a_node(name, "ams")


async def play(seed: int, pool: Any, functions: Any, begin: Callable[[], Awaitable[None]]) -> Any:
    """Make a script's calls; return each with its answer and the state after it."""
    await begin()
    script = Script(seed)
    answers = []
    for _ in range(STEPS):
        call = script.next_call()

        async def act(call: Call = call) -> Any:
            async with transaction(pool) as connection:
                function = getattr(functions, call.name)
                return await function(connection, *call.arguments, **call.named)

        try:
            answer = _plain(await act())
        except (EpochLost, UnknownPeer) as error:
            answer = type(error).__name__
        except asyncpg.PostgresError:
            answer = "refused"
        state = await _state(pool, functions)
        script.generation = Generation(state["row"]["generation"])
        script.epoch = Epoch(state["epoch"])
        answers.append((call, answer, state))
    return answers


async def _state(pool: Any, functions: Any) -> Any:
    async with transaction(pool, isolation="repeatable_read") as connection:
        row = await functions.read_cluster_row(connection)
        fleet = await functions.read_cluster(connection, HEARD)
        assignments = [
            await functions.read_assignment(
                connection, NodeId(name), cluster_id=ClusterId("c1"), epoch=Epoch(1)
            )
            for name in NODES
        ]
        remaining_s = await functions.read_lease_remaining_s(connection)
        lost = sorted(await functions.read_lost_nodes(connection))
        ids = sorted(await functions.read_node_ids(connection))
        peers = await functions.count_peers(connection)
        is_after_loss = await functions.are_routes_after_loss(connection)
    async with transaction(pool) as connection:
        epoch = 0
        for candidate in range(1, 400):
            try:
                async with connection.transaction():
                    await functions.assert_epoch(connection, Epoch(candidate))
                epoch = candidate
                break
            except EpochLost:
                continue
    return {
        "row": _plain(row),
        "fleet": _plain(fleet),
        "assignments": _plain(assignments),
        "is_held": remaining_s > 0,
        "lost": lost,
        "ids": ids,
        "peers": peers,
        "is_after_loss": is_after_loss,
        "epoch": epoch,
    }


TIMES: Final = frozenset(
    {"state_age_s", "age_s", "silent_s", "acting_for_s", "ago_s", "created_at", "licence"}
)


def _plain(value: Any) -> Any:
    """Return builtins without times."""
    return _without_times(msgspec.to_builtins(value))


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in value]
    return value


def simulated_answers(seed: int) -> Any:
    """Play a script on the simulated store, on a loop of its own."""
    loop = SimLoop()
    rng = random.Random(seed)
    store = SimStore(loop, Network(loop, rng), rng)
    tables = store.tables
    tables.pops["ams"] = a_pop("ams")
    tables.models["m"] = a_model()
    tables.deployments["d"] = a_deployment()
    for name in NODES:
        tables.nodes[name] = NodeRow(node_id=name, pop="ams", created_at=store.now())

    async def begin() -> None:
        async with transaction(pool) as connection:
            simulated: Any = connection
            await store_lease.acquire_or_renew_lease(simulated, "s1")

    pool: Any = SimPool(store)
    try:
        return loop.run_until_complete(play(seed, pool, store_functions, begin))
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(3))
async def test_the_simulated_store_answers_as_postgres_does(pool: Pool, seed: int) -> None:
    async def begin() -> None:
        async with transaction(pool) as connection:
            await ensure_cluster(connection, ClusterId("c1"))
            await acquire_or_renew_lease(connection, "s1")
            body = PopBody(city="ams", country="NL", latitude=52.3, longitude=4.8)
            await catalogue.put_pop(connection, "ams", body, None)
            for name in NODES:
                await add_peer(connection, PeerRole.AGENT, name, PopId("ams"))
            await catalogue.put_model(connection, a_model(), None)
            await deployments.add_deployment(connection, a_deployment())

    expected = await play(seed, pool, RealStore(), begin)
    answers = await asyncio.to_thread(copy_context().run, simulated_answers, seed)
    for number, (real, simulated) in enumerate(zip(expected, answers, strict=True)):
        assert simulated[1:] == real[1:], (number, real[0])


async def test_a_lease_of_before_a_clock_was_set_back_is_taken(pool: Pool) -> None:
    async with transaction(pool) as connection:
        await ensure_cluster(connection, ClusterId("c1"))
        assert await acquire_or_renew_lease(connection, "s1") is not None
        assert await acquire_or_renew_lease(connection, "s2") is None
        # As after an hour back: it was to expire in some seconds.
        await connection.execute("UPDATE lease SET expires_at = expires_at + interval '1 hour'")
        taken = await acquire_or_renew_lease(connection, "s2")
    assert taken is not None and taken.epoch == 2


async def test_a_raised_epoch_begins_a_new_term(pool: Pool) -> None:
    async with transaction(pool) as connection:
        await ensure_cluster(connection, ClusterId("c1"))
        await acquire_or_renew_lease(connection, "s1")
        await connection.execute("UPDATE lease SET acting_since = acting_since - interval '1 day'")
        await lease.raise_epoch_and_generation(
            connection, holder="s1", generation=Generation(5), epoch=Epoch(4)
        )
        renewed = await acquire_or_renew_lease(connection, "s1")
    assert renewed is not None and renewed.epoch == 5
    assert renewed.acting_for_s < 3600


async def test_the_first_term_on_another_server_counts_as_one_after_a_loss(pool: Pool) -> None:
    async def after_a_term_of(holder: str) -> bool:
        await lease.release_lease(connection, "s1")
        await lease.release_lease(connection, "s2")
        assert await acquire_or_renew_lease(connection, holder) is not None
        return await lease.are_routes_after_loss(connection)

    async with transaction(pool) as connection:
        await ensure_cluster(connection, ClusterId("c1"))
        await connection.execute("UPDATE cluster SET route_generation = 7")
        assert not await after_a_term_of("s1")
        assert not await after_a_term_of("s2")
        # As in a backup that was taken on another server.
        await connection.execute("UPDATE lease SET server = 'another one'")
        assert await after_a_term_of("s1")
        # It is remembered until routes are published, whoever acts.
        assert await after_a_term_of("s2")
        await keys.next_route_generation(connection, Epoch(4), Generation(0), keys_only=True)
        assert await after_a_term_of("s1")
        await keys.next_route_generation(connection, Epoch(5), Generation(0))
        assert not await after_a_term_of("s2")
