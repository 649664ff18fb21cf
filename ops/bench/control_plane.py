"""One scheduler with a fleet of thousands: CPU, memory, latencies, and a failover.

    python -m ops.bench.control_plane --agents 5000 --routers 400 --for 600 --write

Real sockets on loopback, a real Postgres with fsync, an acting scheduler and a standby, each its
own process, and some real routers. The other peers are simulated (`control_plane_peers`) and share
the machine; the scheduler's CPU time is read from /proc. One router is stopped for a while and one
agent never takes its assignments, to see whether the status names them.
"""

import asyncio
import functools
import os
import resource
import shutil
import signal
import socket
import tempfile
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec

from isochrone.service.files import write_atomic
from isochrone.service.trust.identity import Authority, save_identity
from isochrone.wire.ids import ClusterId
from isochrone.wire.peers.routes import KeyTable
from ops.bench import control_plane_report as report
from ops.bench.control_plane_fleet import deal, make_fleet, seed_keys, seed_store, write_orders
from ops.bench.control_plane_peers import SwarmLog, SwarmOrders
from ops.bench.control_plane_report import NewKey
from ops.bench.control_plane_router import RealRouterFigures
from ops.fleet.processes import Processes
from scheduler.decide.membership.following import BEHIND_S
from scheduler.embedded_postgres import EmbeddedPostgres
from scheduler.store.accounts.keys import read_all_keys
from scheduler.store.migrate import migrate
from scheduler.store.pool import open_pool

ROOT: Final = Path(__file__).parents[2]
NOTES_HEADING: Final = "## What it says"
TOKEN: Final = "bench-admin-token-0123456789"
SETTLE_S: Final = 20.0
AFTER_S: Final = 40.0
CONNECT_TIMEOUT_S: Final = 420.0
CLUSTER: Final = ClusterId("c-bench")


def free_port() -> int:
    """Return a TCP port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SERVED_BY: Final = "router-0"
"""The real router that new keys are tried at."""

STOPPED: Final = "router-1"
"""The real router that is stopped for a while, if there are two."""

ROUTER_PORTS: Final = {f"router-{number}": free_port() for number in range(3)}
KEYS_MADE: Final = 10
PORTS: Final = {name: (free_port(), free_port()) for name in ("a", "b")}


class AdminProbe:
    """Queries the admin API regularly and records each latency."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.latencies_ms: list[float] = []
        self.failures = 0
        self._http = http

    async def ask(self, name: str, method: str, path: str, body: Any = None) -> Any:
        """Send a request to scheduler `name`; return its JSON."""
        url = f"http://127.0.0.1:{PORTS[name][0]}{path}"
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with self._http.request(method, url, json=body, headers=headers) as response:
            return await response.json(content_type=None)

    async def acts(self, name: str) -> bool:
        """Return whether scheduler `name` acts."""
        with suppress(aiohttp.ClientError, TimeoutError):
            return bool((await self.ask(name, "GET", "/healthz")).get("acting"))
        return False

    async def is_accepted(self, key: str) -> bool:
        """Return whether the real router accepts a key."""
        url = f"http://127.0.0.1:{ROUTER_PORTS[SERVED_BY]}/v1/models"
        async with self._http.get(url, headers={"authorization": f"Bearer {key}"}) as response:
            return response.status == 200

    async def router_is_ready(self, name: str) -> bool:
        """Return whether a real router listens and has a table."""
        with suppress(aiohttp.ClientError, TimeoutError):
            url = f"http://127.0.0.1:{ROUTER_PORTS[name]}/healthz"
            async with self._http.get(url) as response:
                return response.status == 200
        return False

    async def all_follow(self, name: str, routers: int, timeout_s: float) -> None:
        """Wait until so many routers follow, as the scheduler says."""
        deadline = monotonic() + timeout_s
        await asyncio.sleep(BEHIND_S)
        while monotonic() < deadline:
            status = await self.ask(name, "GET", "/v1/status")
            if status["routers_ready"] >= routers:
                return
            await asyncio.sleep(1.0)
        raise SystemExit(f"cannot go on: of {routers} routers {status['routers_ready']} follow")

    async def metric(self, name: str, prefix: str) -> float:
        """Return the value of the first metric line with this prefix; 0 if there is none."""
        for line in await self.metrics(name):
            if line.startswith(prefix):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def metrics(self, name: str) -> list[str]:
        """Return the lines of a scheduler's metrics page; none if it is unreachable."""
        with suppress(aiohttp.ClientError, TimeoutError):
            url = f"http://127.0.0.1:{PORTS[name][0]}/metrics"
            async with self._http.get(url) as response:
                return (await response.text()).splitlines()
        return []

    async def probe(self, name: str) -> None:
        """Send the requests of an operator and a dashboard, five a second."""
        requests = [
            ("GET", "/v1/status", None),
            ("GET", "/v1/nodes?limit=100", None),
            ("GET", "/v1/placements?deployment_id=d0007", None),
            ("GET", "/v1/nodes/n00042", None),
            ("POST", "/v1/join-tokens", {"pop": "aaa"}),
        ]
        turn = 0
        while True:
            method, path, body = requests[turn % len(requests)]
            turn += 1
            began = monotonic()
            try:
                await self.ask(name, method, path, body)
                self.latencies_ms.append(1000 * (monotonic() - began))
            except (aiohttp.ClientError, TimeoutError):
                self.failures += 1
            await asyncio.sleep(0.2)


class ControlPlaneBench:
    """The processes of one run."""

    def __init__(self, options: Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        (folder / "logs").mkdir()
        self.processes = Processes(folder / "logs", ROOT)
        self.postgres = EmbeddedPostgres(folder / "pg")
        self.peers: list[str] = []
        self.real = list(ROUTER_PORTS)[: options.real_routers]

    async def start(self) -> None:
        """Start Postgres, store the fleet, write the peers' orders and start one scheduler."""
        write_atomic(self.folder / "token", TOKEN.encode())
        authority = Authority.create(self.folder / "ca", "bench", datetime.now(UTC))
        await self.postgres.start()
        pool = await open_pool(self.postgres.dsn)
        await migrate(pool)
        await pool.close()
        connection = await asyncpg.connect(self.postgres.dsn)
        await connection.execute("INSERT INTO cluster (cluster_id) VALUES ($1)", CLUSTER)
        await connection.close()
        options = self.options
        fleet = make_fleet(
            authority,
            CLUSTER,
            agents=options.agents,
            routers=options.routers,
            devices=options.devices,
            replicas=options.replicas,
        )
        await seed_store(self.postgres.dsn, fleet)
        await seed_keys(self.postgres.dsn, options.keys)
        pool = await open_pool(self.postgres.dsn)
        keys_held = (await read_all_keys(pool, KeyTable())).sums.encode()
        await pool.close()
        for name in self.real:
            save_identity(self.folder / name, fleet.routers.pop().identity)
        urls = tuple(f"http://127.0.0.1:{PORTS[name][1]}" for name in ("a", "b"))
        agents = deal(fleet.agents, options.processes)
        for index, peers in enumerate(agents):
            orders = SwarmOrders(
                urls=urls,
                peers=peers,
                changes_per_s=options.changes / len(agents),
                changes_from_s=30.0,
            )
            write_orders(self.folder / f"agents-{index}.orders", orders)
            self.peers.append(f"agents-{index}")
        routers = SwarmOrders(
            urls=urls,
            peers=tuple(fleet.routers),
            deployments=tuple(fleet.deployments),
            keys_held=keys_held,
            empty=min(options.empty, len(fleet.routers) - 1),
        )
        write_orders(self.folder / "routers-0.orders", routers)
        self.peers.append("routers-0")
        await self.start_scheduler("a")

    async def start_scheduler(self, name: str) -> None:
        """Start one scheduler."""
        admin, control = PORTS[name]
        settings = {
            "NAME": name,
            "DATABASE_URL": self.postgres.dsn,
            "AUTHORITY": str(self.folder / "ca"),
            "ADMIN_TOKEN_FILE": str(self.folder / "token"),
            "ADMIN_PORT": str(admin),
            "CONTROL_PORT": str(control),
            "CONTROL_CONNECTIONS_PER_ADDRESS_MAX": "20000",
            # All peers come from one address.
            "UNREGISTERED_PEERS_MAX": "20000",
            "UNREGISTERED_PEERS_PER_NETWORK_MAX": "20000",
        }
        env = {f"ISOCHRONE_SCHEDULER_{key}": value for key, value in settings.items()}
        await self.processes.start(name, ["scheduler", "serve"], env)

    async def start_peers(self) -> None:
        """Start all simulated peers at the same time."""
        for name in self.peers:
            kind = name.partition("-")[0]
            await self.processes.start(
                name,
                [
                    "ops.bench.control_plane_peers",
                    kind,
                    str(self.folder / f"{name}.orders"),
                    str(self.folder / f"{name}.log"),
                ],
            )

    async def start_routers(self) -> None:
        """Start the real routers, without a stored table."""
        urls = [f"http://127.0.0.1:{PORTS[name][1]}" for name in ("a", "b")]
        for name in self.real:
            folder, figures = self.folder / name, self.folder / f"{name}.json"
            arguments = [str(folder), str(ROUTER_PORTS[name]), str(figures), *urls]
            await self.processes.start(name, ["ops.bench.control_plane_router", *arguments])

    async def all_follow(self, admin: "AdminProbe", name: str) -> None:
        """Wait until all routers, the real ones and the simulated, have the table."""
        for router in self.real:
            ready = functools.partial(admin.router_is_ready, router)
            await self.processes.wait(router, ready, CONNECT_TIMEOUT_S)
        await admin.all_follow(name, self.options.routers, CONNECT_TIMEOUT_S)

    async def not_following(self, admin: "AdminProbe", name: str) -> list[str]:
        """Stop a real router for a while; return which peers do not follow, as the status says."""
        if STOPPED not in self.real:
            return list((await admin.ask(name, "GET", "/v1/status"))["not_following"])
        pid = self.processes.pid(STOPPED)
        os.kill(pid, signal.SIGSTOP)
        try:
            await self.new_keys(admin, name, count=1)
            await asyncio.sleep(BEHIND_S + 5.0)
            return list((await admin.ask(name, "GET", "/v1/status"))["not_following"])
        finally:
            os.kill(pid, signal.SIGCONT)

    async def new_keys(
        self, admin: "AdminProbe", name: str, count: int = KEYS_MADE
    ) -> list[NewKey]:
        """Create keys one by one; return when each was made, and accepted by a real router."""
        made = []
        for number in range(count):
            reply = await admin.ask(name, "POST", "/v1/keys", {"tenant_id": f"new-{number}"})
            at = monotonic()
            while not await admin.is_accepted(reply["key"]):  # noqa: ASYNC110 - no hook needed
                await asyncio.sleep(0.01)
            made.append(NewKey(reply["key_id"], at, monotonic()))
            await asyncio.sleep(1.0)
        return made

    def real_routers(self) -> list[RealRouterFigures]:
        """Return what the real routers have written so far."""
        return [
            msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=RealRouterFigures)
            for name in self.real
        ]

    async def stop_peers(self) -> list[SwarmLog]:
        """Stop the simulated peers and return their logs."""
        await asyncio.gather(*(self.processes.stop(name) for name in self.peers))
        return [
            msgspec.msgpack.decode((self.folder / f"{name}.log").read_bytes(), type=SwarmLog)
            for name in self.peers
        ]

    async def all_connected(self, admin: AdminProbe, name: str) -> float:
        """Wait until every peer is connected to this scheduler; return the time."""
        expected = self.options.agents + self.options.routers
        deadline = monotonic() + CONNECT_TIMEOUT_S
        while monotonic() < deadline:
            agents = await admin.metric(name, 'isochrone_scheduler_peers{role="agent"}')
            routers = await admin.metric(name, 'isochrone_scheduler_peers{role="router"}')
            if agents + routers >= expected:
                return monotonic()
            await asyncio.sleep(0.5)
        status = await admin.ask(name, "GET", "/v1/status")
        raise SystemExit(
            f"cannot connect all peers: only {agents:.0f} agents and {routers:.0f} routers; "
            f"not following: {status.get('not_following')}"
        )


async def measure(options: Namespace, folder: Path) -> report.ControlPlaneRun:
    """Start everything, measure it, kill the acting scheduler and measure the failover."""
    bench = ControlPlaneBench(options, folder)
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        admin = AdminProbe(http)
        try:
            await bench.start()
            await bench.processes.wait("a", lambda: admin.acts("a"), 60.0)
            await bench.start_scheduler("b")
            began = monotonic()
            await bench.start_peers()
            await bench.start_routers()
            connected_at = await bench.all_connected(admin, "a")
            print(f"all connected after {connected_at - began:.1f} s", flush=True)
            await bench.all_follow(admin, "a")
            followed_at = monotonic()
            print(f"all have the table after {followed_at - began:.1f} s", flush=True)
            await asyncio.sleep(SETTLE_S)
            steady = report.ResourceWindow(bench.processes.pid("a"), bench.postgres.pid)
            probing = asyncio.create_task(admin.probe("a"))
            before = await admin.metrics("a")
            await steady.watch(options.seconds)
            growth = report.MetricsGrowth(before, await admin.metrics("a"))
            probing.cancel()
            made = await bench.new_keys(admin, "a")
            real = bench.real_routers()
            behind = await bench.not_following(admin, "a")
            print(f"not following: {behind}", flush=True)
            await asyncio.sleep(SETTLE_S)
            tables = await admin.metrics("a")
            killed_at = monotonic()
            os.kill(bench.processes.pid("a"), signal.SIGKILL)
            after = report.ResourceWindow(bench.processes.pid("b"), bench.postgres.pid)
            watching = asyncio.create_task(after.watch(AFTER_S))
            while not await admin.acts("b"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            acting_at = monotonic()
            print(f"the standby acts after {acting_at - killed_at:.1f} s", flush=True)
            again_at = await bench.all_connected(admin, "b")
            print(f"all connected again after {again_at - killed_at:.1f} s", flush=True)
            await watching
            await asyncio.sleep(max(0.0, AFTER_S - (monotonic() - again_at)))
            tables_after = await admin.metrics("b")
            real_after = bench.real_routers()
            logs = await bench.stop_peers()
        finally:
            await bench.processes.stop_all(lambda names: None)
            await bench.postgres.stop()
    return report.ControlPlaneRun(
        options=vars(options),
        logs=logs,
        steady=steady,
        growth=growth,
        after=after,
        admin_ms=admin.latencies_ms,
        admin_failures=admin.failures,
        started_at=began,
        connected_at=connected_at,
        killed_at=killed_at,
        acting_at=acting_at,
        again_at=again_at,
        followed_at=followed_at,
        made=made,
        real=real,
        real_after=real_after,
        behind=behind,
        tables_sent=[report.tables_sent(tables), report.tables_sent(tables_after)],
    )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=5000)
    parser.add_argument("--routers", type=int, default=400)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--devices", type=int, default=8, help="devices of each node")
    parser.add_argument(
        "--changes", type=float, default=2.0, help="replicas that change their state in a second"
    )
    parser.add_argument("--replicas", type=int, default=2, help="warm replicas of each node")
    parser.add_argument("--real-routers", type=int, default=2, help="how many routers are real")
    parser.add_argument(
        "--empty", type=int, default=10, help="simulated routers that begin without keys"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes that simulate agents")
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--write", action="store_true", help="write the table to control_plane.md")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    options = parser.parse_args()
    if not 1 <= options.real_routers <= min(len(ROUTER_PORTS), options.routers - 2):
        parser.error(f"--real-routers must be 1 to {len(ROUTER_PORTS)}, two less than --routers")
    # Every peer has a socket here and one at the scheduler.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # SIGTERM too stops every process that this one started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="isochrone-bench-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        text = report.table(asyncio.run(measure(options, folder)))
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(text)
    if options.write:
        page = Path(__file__).with_suffix(".md")
        _, heading, notes = page.read_text().partition(NOTES_HEADING)
        page.write_text(f"{text}\n{heading}{notes}")


if __name__ == "__main__":
    main()
