"""What must hold at every moment of a history, and what must hold once all faults are over.

At every moment:
1. Writes are fenced: no write under an older epoch than one that has written, none under an epoch
   of another process (checked by the store).
2. An engine that works is stopped by a tombstone only (checked by the machine).
3. The engines of a node fit into its devices, and no replica runs twice.
4. While no engine is lost through a fault, a deployment does not fall below its replicas.
5. A router that had routes keeps some as long as one of these replicas is warm throughout and not
   to end, also when it is started again. A deployment of which it has known a replica has a route
   within NOTICED_S of one of its known replicas being warm again, whoever else is down.
6. No event is deleted before its time, whatever the clocks say.
7. No job fails with an error that is not expected of a fault.
8. The assignment of a node and the table of a running router never become older.
9. No two schedulers act under one epoch.

Once faults are over, within SETTLE_S: one scheduler acts; everything acknowledged is stored; every
deployment has its replicas, on nodes that live; no engine runs without a placement; every router
has the routes of exactly the warm replicas, every key, and no revoked one.
"""

import logging
from collections import Counter
from typing import Final

from tests.builders import GIB
from tests.simulation.faults import Nemesis
from tests.simulation.store import EPOCH_UNIX_S
from tests.simulation.world import DEVICE_GIB, MODEL_GIB, OLD_EVENT_AGE_S, Deployed, World

SETTLE_S: Final = 240.0
"""More than a new term's grace of 60 s and the backoff of engines that could not start."""

NOTICED_S: Final = 6.0
"""Within this time a router knows that a replica is warm again: three probes."""

REPLICAS_PER_NODE: Final = int(DEVICE_GIB / (1.25 * MODEL_GIB))
EXPECTED_ERRORS: Final = frozenset({"EpochLost", "NotActing"})


class Watch(logging.Handler):
    """Checks the invariants of every moment."""

    def __init__(self, world: World, nemesis: Nemesis) -> None:
        super().__init__(logging.ERROR)
        self._world, self._nemesis = world, nemesis
        self._routed: dict[str, set[str]] = {}
        """By router: of the routes that it last had, those whose replicas have been warm since."""
        self._known: dict[str, set[str]] = {}
        """By router: the replicas that it has had routes to."""
        self._warm_since: dict[str, float] = {}
        self._up_since: dict[str, tuple[int, float]] = {}
        """By router: its current start, and since when it runs without a pause."""
        self._complete: dict[str, Deployed] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self.problems: list[str] = []
        """What did not hold at the first moment at which something did not."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a job's unexpected error as a problem."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or type(error).__name__ in EXPECTED_ERRORS:
            return
        is_crash = isinstance(error, OSError | TimeoutError)
        if not is_crash:
            self._world.problems.append(f"{record.getMessage()}: {error!r}")

    def check(self) -> None:
        """Note what does not hold now."""
        if not self.problems:
            self.problems = self._problems()

    def _problems(self) -> list[str]:
        world = self._world
        found = [*world.problems, *world.store.problems, *world.loop.errors]
        found += self._engines() + self._capacity() + self._routes() + self._events()
        found += self._progress() + self._epochs()
        return found

    def _engines(self) -> list[str]:
        found = []
        runs: Counter[str] = Counter()
        for node in self._world.nodes.values():
            runs.update(node.engines.keys())
            taken = sum(engine.spec.memory_bytes for engine in node.engines.values())
            if taken > DEVICE_GIB * GIB:
                found.append(
                    f"the engines of {node.name} take {taken} bytes: {node.engines.keys()}"
                )
        found += [
            f"{replica_id} runs {times} times" for replica_id, times in runs.items() if times > 1
        ]
        return found

    def _capacity(self) -> list[str]:
        """While no fault takes engines, none may be missing once they have been there."""
        if self._nemesis.profile.loses_engines or self._nemesis.profile.restores:
            return []
        found = []
        serving = self._serving()
        for name, deployed in self._world.deployed.items():
            count = serving[name]
            if count >= deployed.replicas_min:
                self._complete[name] = deployed
            elif self._complete.get(name) is deployed:
                found.append(f"{name} has {count} of {deployed.replicas_min} replicas")
        return found

    def _serving(self) -> Counter[str]:
        """Count the engines by deployment that are ready and not to end, agent or not."""
        now, placements = self._world.loop.now_s, self._world.store.tables.placements
        return Counter(
            engine.spec.deployment_id
            for node in self._world.nodes.values()
            for replica_id, engine in node.engines.items()
            if engine.ready_at <= now
            and ((row := placements.get(replica_id)) is None or row.ended_at is None)
        )

    def _routes(self) -> list[str]:
        world = self._world
        placements = world.store.tables.placements
        warm = {
            replica_id
            for node in world.nodes.values()
            for replica_id in node.warm()
            if (row := placements.get(replica_id)) is None or row.ended_at is None
        }
        now_s = world.loop.now_s
        found = self._unnoticed(warm)
        for router in world.routers.values():
            before = self._routed.get(router.name, set())
            lost = self._routed[router.name] = (router.routes() or before) & warm
            # Its probes may not have seen yet that an engine has come back.
            lost = {id_ for id_ in lost if now_s - self._warm_since[id_] >= NOTICED_S}
            if router.table is not None and not router.table.routes and lost:
                found.append(f"{router.name} has no routes while {sorted(lost)} are warm")
        return found

    def _unnoticed(self, warm: set[str]) -> list[str]:
        """Return the routers that lack a deployment although they could know of a replica."""
        now_s = self._world.loop.now_s
        self._warm_since = {id_: self._warm_since.get(id_, now_s) for id_ in warm}
        found = []
        for router in self._world.routers.values():
            known, routes = self._known.setdefault(router.name, set()), router.routes()
            known |= routes
            boot, up_since = self._up_since.get(router.name, (0, now_s))
            if boot != router.boots or not router.process.is_alive or router.process.is_paused:
                up_since = now_s
            self._up_since[router.name] = router.boots, up_since
            if now_s - up_since < NOTICED_S or router.table is None:
                continue
            routed = {self._deployment(replica_id) for replica_id in routes}
            found += [
                f"{router.name} has no route to {self._deployment(replica_id)} while "
                f"{replica_id} is warm"
                for replica_id in sorted(known & warm)
                if now_s - self._warm_since[replica_id] >= NOTICED_S
                and self._deployment(replica_id) not in routed
            ]
        return found

    def _deployment(self, replica_id: str) -> str:
        return replica_id.partition("-")[0]

    def _progress(self) -> list[str]:
        """Return what became older. A router that starts may read an older table from its disk."""
        found = []
        for process, newest in self._world.generations().items():
            before = self._newest.get(process, newest)
            if newest < before:
                found.append(f"{process} goes back from epoch and generation {before} to {newest}")
            self._newest[process] = newest
        return found

    def _epochs(self) -> list[str]:
        acting = Counter(
            scheduler.state.lease.epoch
            for scheduler in self._world.schedulers.values()
            if scheduler.is_acting and scheduler.state is not None
        )
        return [f"{count} schedulers act in epoch {e}" for e, count in acting.items() if count > 1]

    def _events(self) -> list[str]:
        if self._nemesis.has_restored:
            return []
        events = self._world.store.tables.events
        lost = [number for number in range(1, 4) if number not in events]
        age_days = OLD_EVENT_AGE_S / 86_400
        return [f"events {lost} of {age_days:.0f} days ago are deleted"] if lost else []


def unsettled(world: World, nemesis: Nemesis) -> list[str]:
    """Return what does not hold yet after the faults."""
    found = []
    if world.acting() is None:
        found.append("not exactly one scheduler acts")
    found += _not_stored(world, nemesis) + _misplaced(world) + _not_followed(world)
    return found


def _not_stored(world: World, nemesis: Nemesis) -> list[str]:
    """Return what was acknowledged and is lost. A restored backup may have lost it."""
    if nemesis.has_restored:
        return []
    tables = world.store.tables
    found = [f"key {key} is lost" for key in world.keys if key not in tables.keys]
    found += [f"{key} is not revoked" for key in world.revoked if key not in tables.revoked_keys]
    for name, deployed in world.deployed.items():
        stored = tables.deployments.get(name)
        if stored is None or stored.policy.replicas_min != deployed.replicas_min:
            found.append(f"deployment {name} is not stored with {deployed.replicas_min} replicas")
    return found


def _misplaced(world: World) -> list[str]:
    tables = world.store.tables
    found = []
    running: Counter[str] = Counter()
    for node in world.nodes.values():
        for replica_id, engine in node.engines.items():
            row = tables.placements.get(replica_id)
            if row is None or row.released_at is not None:
                found.append(f"{replica_id} runs on {node.name} without a placement")
            elif row.ended_at is None and replica_id in node.warm():
                running[engine.spec.deployment_id] += 1
    alive = {node.name for node in world.nodes.values() if not node.is_destroyed}
    for row in tables.placements.values():
        is_expected = row.node_id in alive and row.released_at is None
        if is_expected and row.replica_id not in world.nodes[row.node_id].engines:
            found.append(f"{row.replica_id} ({row.state}) does not run on {row.node_id}")
    capacity = REPLICAS_PER_NODE * len(alive)
    # A replica beyond the minimum is not ended at once where another deployment needs its place.
    needed = sum(
        max(row.policy.replicas_min, running[name]) for name, row in tables.deployments.items()
    )
    is_full = capacity < needed
    for name, deployment in tables.deployments.items():
        policy, count = deployment.policy, running[name]
        if count > policy.replicas_max or (count < policy.replicas_min and not is_full):
            found.append(f"{name} has {count} replicas, not {policy.replicas_min}")
    if is_full and sum(running.values()) < capacity:
        found.append(f"{sum(running.values())} replicas run, {capacity} fit")
    return found


def _not_followed(world: World) -> list[str]:
    tables = world.store.tables
    keys = set(tables.keys) - set(tables.revoked_keys)
    warm = {
        replica_id
        for node in world.nodes.values()
        for replica_id in node.warm()
        if (row := tables.placements.get(replica_id)) is not None and row.ended_at is None
    }
    found = []
    for router in world.routers.values():
        if router.table is None:
            found.append(f"{router.name} has no table")
            continue
        if router.routes() != warm:
            found.append(f"{router.name} has {sorted(router.routes())}, warm are {sorted(warm)}")
        if {key.key_id for key in router.table.keys} != keys:
            found.append(f"{router.name} has not the keys {sorted(keys)}")
    return found


__all__ = ("EPOCH_UNIX_S", "SETTLE_S", "Watch", "unsettled")
