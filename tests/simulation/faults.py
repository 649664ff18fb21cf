"""What happens to a fleet: faults and an operator's changes, drawn from the history's seed."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, NamedTuple

from tests.simulation.event_loop import SimProcess
from tests.simulation.machines import SimNode
from tests.simulation.store import DATABASE, Tables
from tests.simulation.world import World

FAULTS_S: Final = 60.0
"""For how long faults are drawn."""

BETWEEN_S: Final = (0.5, 9.0)
RESTORE_S: Final = (0.5, 15.0)
"""A restore may be shorter than a lease, and longer."""

LOST_DEPLOYMENT: Final = "f"
"""A deployment that no backup has: it is made after the one that `take_over` restores."""

KNOWN_S: Final = 6.0
"""A backup is taken this long after the beginning: a term waits for the nodes that it has."""

CUT_S: Final = 22.0
"""How long `take_over` cuts the nodes off. After 30 s a term counts a silent node as lost."""

FROZEN_AFTER_S: Final = 32.0
"""So long after a cut of most nodes placement is frozen: they are silent for 30 s first."""

HEARD: Final = 2
"""So many nodes `freeze` leaves in contact."""

FREEZES_EVERY: Final = 10
FREEZES_AT: Final = 3
"""Of each ten seeds this one freezes placement. No draw says so: each other seed's draws stay."""

BESIDE_FREEZES: Final = frozenset(
    {"freeze", "crash_scheduler", "pause_scheduler", "cut_database", "crash_database", "slow"}
    | {"lose_commit_answers", "jump"}
)
"""What may happen besides: nothing that a node which is cut off for good would have to follow."""

HOUR_S: Final = 3600.0
JUMPS_S: Final = (HOUR_S, -HOUR_S, 3 * HOUR_S, 400 * 24 * HOUR_S)
"""Steps of a clock: of an hour or more, and of more than events are kept."""


class Profile(NamedTuple):
    """What may happen in one history."""

    loses_engines: bool
    restores: bool
    jumps: bool
    freezes: bool


class Fault(NamedTuple):
    """A fault by its name, and how often it is drawn relative to others."""

    name: str
    weight: int
    strike: Callable[["Nemesis"], Coroutine[Any, Any, None]]


class Nemesis:
    """Draws faults (of `only` these names, if any are given), then repairs what can be repaired."""

    def __init__(self, world: World, seed: int, only: Collection[str] = ()) -> None:
        self.world = world
        self.rng = world.rng
        shares = (0.6, 0.25, 0.3)
        loses_engines, restores, jumps = (self.rng.random() < share for share in shares)
        freezes = seed % FREEZES_EVERY == FREEZES_AT
        if only:
            lost = {"kill_engine", "break_engines", "lose_power", "destroy"}
            loses_engines = bool(lost & set(only))
            restores = bool({"restore", "take_over"} & set(only))
            jumps, freezes = "jump" in only, "freeze" in only
        self.profile = Profile(loses_engines or freezes, restores, jumps, freezes)
        self._only = frozenset(only)
        self.is_over = False
        self.has_restored = False
        self.hung: list[SimProcess] = []
        self.is_freezing = False
        self.cut_off: list[tuple[str, str]] = []
        """Directions that stay cut for good."""
        self.broken: SimNode | None = None
        """A node whose engines cannot start any more."""
        self._backups: list[Tables] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Strike now and then for FAULTS_S."""
        world = self.world
        world.note(f"profile {self.profile}")
        faults = [fault for fault in FAULTS if self._is_allowed(fault)]
        weights = [fault.weight for fault in faults]
        until = world.loop.now_s + FAULTS_S
        if self.profile.freezes:
            # First of all, as what the others do may take most of the time.
            self._tasks.append(asyncio.create_task(_freeze(self)))
        while world.loop.now_s < until:
            fault = self.rng.choices(faults, weights)[0]
            self._tasks.append(asyncio.create_task(fault.strike(self)))
            await asyncio.sleep(self.rng.uniform(*BETWEEN_S))
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        self.repair()

    def repair(self) -> None:
        """End every fault that an operator or a supervisor would end."""
        world = self.world
        world.note("repaired")
        world.network.heal()
        for pair in self.cut_off:
            world.network.cut(*pair)
        world.network.slow_s = world.store.slow_s = 0.0
        world.store.loses_commit_answers = 0.0
        world.store.start()
        for scheduler in world.schedulers.values():
            if scheduler.process not in self.hung:
                scheduler.process.resume()
            if not scheduler.process.is_alive:
                scheduler.start()
        peers: list[Any] = [*world.nodes.values(), *world.routers.values()]
        for machine in peers:
            machine.process.resume()
            if not machine.process.is_alive and not getattr(machine, "is_destroyed", False):
                machine.start()
        for node in world.nodes.values():
            node.is_disk_full = False
            node.breaks_engines = node is self.broken
        self.is_over = True

    def _is_allowed(self, fault: Fault) -> bool:
        if self.profile.freezes and fault.name not in BESIDE_FREEZES:
            return False
        needed = {
            "freeze": self.profile.freezes,
            "kill_engine": self.profile.loses_engines,
            "break_engines": self.profile.loses_engines,
            "lose_power": self.profile.loses_engines,
            "destroy": self.profile.loses_engines,
            "restore": self.profile.restores,
            "take_over": self.profile.restores,
            "jump": self.profile.jumps,
        }
        return fault.name in self._only if self._only else needed.get(fault.name, True)

    def a_while(self, longest_s: float = 40.0) -> float:
        return min(longest_s, self.rng.choice((0.3, 2.0, 8.0, 20.0, 45.0)) * self.rng.random() * 2)

    def some_node(self) -> Any:
        up = [node for node in self.world.nodes.values() if not node.is_destroyed]
        return self.rng.choice(up)

    def some_peer(self) -> Any:
        return self.rng.choice([self.some_node(), *self.world.routers.values()])

    async def crash(self, process: Any, rest_s: float) -> None:
        """Crash a process, and let its supervisor start it again."""
        if process.process.is_alive:
            self.world.note(f"crash of {process.name} for {rest_s:.1f} s")
            process.crash()
            try:
                await asyncio.sleep(rest_s)
            finally:
                if not process.process.is_alive and not getattr(process, "is_destroyed", False):
                    process.start()

    async def pause(self, process: Any, rest_s: float) -> None:
        """Stop a process for a while, as a machine that swaps."""
        if process.process.is_alive:
            self.world.note(f"pause of {process.name} for {rest_s:.1f} s")
            paused = process.process
            paused.pause()
            self.world.network.paused(paused)
            try:
                await asyncio.sleep(rest_s)
            finally:
                if paused not in self.hung:
                    paused.resume()

    async def cut(self, pairs: list[tuple[str, str]], rest_s: float) -> None:
        """Cut directions for a while."""
        network = self.world.network
        self.world.note(f"cut of {pairs} for {rest_s:.1f} s")
        for pair in pairs:
            network.cut(*pair)
        try:
            await asyncio.sleep(rest_s)
        finally:
            for pair in pairs:
                network.heal(*pair)

    def keep_backup(self) -> None:
        """Take a backup that may be restored later."""
        self._backups.append(self.world.store.tables.copy())

    @property
    def newest_backup(self) -> Tables:
        """Return the backup that was taken last."""
        return self._backups[-1]

    async def restore(self, backup: Tables | None = None) -> None:
        """Restore `backup`, or any one. What was acknowledged since is lost, with consent."""
        store = self.world.store
        if store.is_down:
            return
        store.crash()
        await asyncio.sleep(self.rng.uniform(*RESTORE_S))
        backup = backup or self.rng.choice(self._backups)
        self.world.note(f"restore of generation {backup.generation}")
        self.has_restored = True
        store.restore(backup.copy())


async def _crash_scheduler(nemesis: Nemesis) -> None:
    scheduler = nemesis.rng.choice(list(nemesis.world.schedulers.values()))
    await nemesis.crash(scheduler, nemesis.a_while(20.0))


async def _pause_scheduler(nemesis: Nemesis) -> None:
    scheduler = nemesis.rng.choice(list(nemesis.world.schedulers.values()))
    await nemesis.pause(scheduler, nemesis.a_while(60.0))


async def _hang_scheduler(nemesis: Nemesis) -> None:
    # For good: the other one must take over, although this one's host still accepts connections.
    scheduler = nemesis.rng.choice(list(nemesis.world.schedulers.values()))
    if scheduler.process.is_alive and not nemesis.hung:
        nemesis.world.note(f"{scheduler.name} hangs")
        nemesis.hung.append(scheduler.process)
        scheduler.process.pause()
        nemesis.world.network.paused(scheduler.process)


async def _crash_peer(nemesis: Nemesis) -> None:
    await nemesis.crash(nemesis.some_peer(), nemesis.a_while())


async def _pause_peer(nemesis: Nemesis) -> None:
    await nemesis.pause(nemesis.some_peer(), nemesis.a_while())


async def _cut_peer(nemesis: Nemesis) -> None:
    rng, peer = nemesis.rng, nemesis.some_peer().name
    schedulers = rng.choice((["a"], ["b"], ["a", "b"]))
    to_peer = [(scheduler, peer) for scheduler in schedulers]
    from_peer = [(peer, scheduler) for scheduler in schedulers]
    pairs = rng.choice((to_peer, from_peer, to_peer + from_peer, to_peer + from_peer))
    await nemesis.cut(pairs, nemesis.a_while())


async def _cut_all(nemesis: Nemesis) -> None:
    world = nemesis.world
    peers = (*world.nodes, *world.routers)
    schedulers = nemesis.rng.choice((["a"], ["b"], ["a", "b"]))
    pairs = [pair for s in schedulers for p in peers for pair in ((s, p), (p, s))]
    await nemesis.cut(pairs, nemesis.a_while())


async def _cut_database(nemesis: Nemesis) -> None:
    name = nemesis.rng.choice(("a", "b"))
    await nemesis.cut([(name, DATABASE), (DATABASE, name)], nemesis.a_while())


async def _crash_database(nemesis: Nemesis) -> None:
    store = nemesis.world.store
    if not store.is_down:
        rest_s = nemesis.a_while()
        nemesis.world.note(f"crash of the database for {rest_s:.1f} s")
        store.crash()
        try:
            await asyncio.sleep(rest_s)
        finally:
            store.start()


async def _lose_commit_answers(nemesis: Nemesis) -> None:
    nemesis.world.note("answers to commits are lost")
    nemesis.world.store.loses_commit_answers = 0.5
    await asyncio.sleep(nemesis.a_while(10.0))
    nemesis.world.store.loses_commit_answers = 0.0


async def _slow(nemesis: Nemesis) -> None:
    world = nemesis.world
    world.network.slow_s = nemesis.rng.choice((0.0, 0.5, 3.0))
    world.store.slow_s = nemesis.rng.choice((0.0, 0.3, 2.0))
    world.note(f"network +{world.network.slow_s} s, database +{world.store.slow_s} s")
    await asyncio.sleep(nemesis.a_while(20.0))
    world.network.slow_s = world.store.slow_s = 0.0


async def _fill_disk(nemesis: Nemesis) -> None:
    node = nemesis.some_node()
    nemesis.world.note(f"disk of {node.name} full")
    node.is_disk_full = True
    await asyncio.sleep(nemesis.a_while())
    node.is_disk_full = False


async def _kill_engine(nemesis: Nemesis) -> None:
    node = nemesis.some_node()
    if node.engines:
        replica_id = nemesis.rng.choice(sorted(node.engines))
        nemesis.world.note(f"crash of engine {replica_id} on {node.name}")
        node.kill_engine(replica_id)


async def _break_engines(nemesis: Nemesis) -> None:
    node = nemesis.some_node()
    nemesis.world.note(f"engines cannot start on {node.name}")
    node.breaks_engines = True
    for replica_id in list(node.engines):
        node.kill_engine(replica_id)
    await asyncio.sleep(nemesis.a_while())
    node.breaks_engines = False


async def _lose_power(nemesis: Nemesis) -> None:
    node = nemesis.some_node()
    if node.process.is_alive:
        node.lose_power()
        await asyncio.sleep(nemesis.a_while())
        nemesis.world.note(f"{node.name} starts after a power loss")
        if not node.process.is_alive:
            node.start()


async def _destroy(nemesis: Nemesis) -> None:
    # One of three or more: of a larger share the fleet is frozen for ten minutes.
    if not any(node.is_destroyed for node in nemesis.world.nodes.values()):
        node = nemesis.some_node()
        nemesis.world.note(f"{node.name} is destroyed")
        node.is_destroyed = True
        node.lose_power()


async def _freeze(nemesis: Nemesis) -> None:
    """Cut most nodes off for good, and once placement is frozen break one of the others."""
    world, rng = nemesis.world, nemesis.rng
    if nemesis.is_freezing:
        return
    nemesis.is_freezing = True
    if len(world.nodes) < HEARD + 2:
        # Of three nodes one would be cut off, and one alone is lost.
        world.add_node().start()
    nodes = list(world.nodes.values())
    # A name that has never connected says nothing about the network.
    while not (world.is_complete() and all(node.stored_assignment for node in nodes)):
        await asyncio.sleep(0.5)
    broken = min((node for node in nodes if node.engines), key=lambda node: len(node.engines))
    spare = rng.choice([node for node in nodes if not node.engines])
    silent = [node.name for node in nodes if node not in (broken, spare)]
    nemesis.cut_off = [pair for s in ("a", "b") for n in silent for pair in ((s, n), (n, s))]
    world.note(f"{silent} are cut off for good")
    for pair in nemesis.cut_off:
        world.network.cut(*pair)
    await asyncio.sleep(FROZEN_AFTER_S)
    world.note(f"engines cannot start on {broken.name} any more")
    nemesis.broken, broken.breaks_engines = broken, True
    for replica_id in list(broken.engines):
        broken.kill_engine(replica_id)


async def _restore(nemesis: Nemesis) -> None:
    nemesis.keep_backup()
    await asyncio.sleep(nemesis.a_while(30.0))
    await nemesis.restore()


async def _take_over(nemesis: Nemesis) -> None:
    """Lose a deployment with a backup while no node is heard, then crash who has noticed it."""
    world, rng = nemesis.world, nemesis.rng
    if LOST_DEPLOYMENT in world.deployed:
        return
    await asyncio.sleep(KNOWN_S)
    nemesis.keep_backup()
    backup = nemesis.newest_backup
    await world.deploy(LOST_DEPLOYMENT, 1, 1)
    await asyncio.sleep(rng.uniform(15.0, 25.0))
    pairs = [pair for s in ("a", "b") for n in world.nodes for pair in ((s, n), (n, s))]
    cutting = asyncio.create_task(nemesis.cut(pairs, CUT_S))
    try:
        await nemesis.restore(backup)
        await asyncio.sleep(rng.uniform(4.0, 12.0))
        acting = world.acting()
        if acting is not None:
            await nemesis.crash(acting, 30.0)
        await cutting
    finally:
        cutting.cancel()


async def _jump(nemesis: Nemesis) -> None:
    world = nemesis.world
    jump_s = nemesis.rng.choice(JUMPS_S)
    hosts = nemesis.rng.choice((["a"], ["b"], ["db"], ["a", "b", "db"]))
    world.note(f"the clocks of {hosts} jump by {jump_s:.0f} s")
    for host in hosts:
        if host == DATABASE:
            world.store.clock_ahead_s += jump_s
        else:
            world.wall.ahead_s[host] = world.wall.ahead_s.get(host, 0.0) + jump_s


async def _operate(nemesis: Nemesis) -> None:
    world, rng = nemesis.world, nemesis.rng
    change = rng.choice(("scale", "add_key", "add_key", "revoke_key"))
    if change == "scale":
        replicas = rng.choice((1, 2, 3))
        await world.deploy(rng.choice(("d", "e")), replicas, replicas)
    elif change == "add_key":
        await world.add_key()
    else:
        await world.revoke_key()


FAULTS: Final = (
    Fault("crash_scheduler", 4, _crash_scheduler),
    Fault("pause_scheduler", 3, _pause_scheduler),
    Fault("hang_scheduler", 1, _hang_scheduler),
    Fault("crash_peer", 3, _crash_peer),
    Fault("pause_peer", 2, _pause_peer),
    Fault("cut_peer", 4, _cut_peer),
    Fault("cut_all", 2, _cut_all),
    Fault("cut_database", 2, _cut_database),
    Fault("crash_database", 3, _crash_database),
    Fault("lose_commit_answers", 2, _lose_commit_answers),
    Fault("slow", 2, _slow),
    Fault("fill_disk", 1, _fill_disk),
    Fault("kill_engine", 4, _kill_engine),
    Fault("break_engines", 1, _break_engines),
    Fault("lose_power", 2, _lose_power),
    Fault("destroy", 2, _destroy),
    Fault("freeze", 1, _freeze),
    Fault("restore", 5, _restore),
    Fault("take_over", 3, _take_over),
    Fault("jump", 5, _jump),
    Fault("operate", 6, _operate),
)
