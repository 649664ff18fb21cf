"""Starts and stops the demo fleet, and reports each step."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp

from isochrone.cli.client import AdminClient, AdminError
from isochrone.service.config import ConfigError
from isochrone.service.files import lock_state_folder, write_atomic
from ops.fleet import layout, model
from ops.fleet.cities import CITIES, City
from ops.fleet.processes import Processes, StartFailed
from scheduler.embedded_postgres import PostgresError, find_binaries

START_TIMEOUT_S = 120.0  # a process that ends is noticed at once; on a busy machine initdb is slow
WARM_TIMEOUT_S = 300.0
TENANT = "demo"

Say = Callable[[str], None]


class LocalFleet:
    """The demo's processes and a client of their admin API."""

    def __init__(self, state: Path, say: Say) -> None:
        self.state = state
        self.key = ""
        self.token = secrets.token_urlsafe(32)
        self.api = AdminClient(layout.admin_url(), self.token)
        self.processes = Processes(state / "logs", layout.ROOT)
        self._say = say
        self._database = layout.database_folder(state)
        self._state_lock = ExitStack()
        self._owns_state = False

    async def up(self) -> None:
        """Start all processes and create a key. Raises StartFailed or AdminError."""
        await asyncio.to_thread(self._claim_state)
        await self._start_database()
        await self._start_scheduler()
        await self._create_pops()
        await self._start_nodes_and_routers()
        created = await self.ask("POST", "/v1/keys", {"tenant_id": TENANT, "note": "make up"})
        self.key = created["key"]

    async def deploy(self) -> None:
        """Add the model to the catalogue, deploy it in the first city and wait until it is warm."""
        self._say(f"catalogue: adding {model.NAME}, hashing its files")
        entry = await asyncio.to_thread(model.catalogue_entry)
        await self.ask("PUT", f"/v1/models/{model.NAME}", entry)
        await self.ask("POST", "/v1/deployments", model.deployment_body(CITIES[0].pop))
        await self.wait_warm(CITIES[0])

    async def wait_warm(self, city: City) -> None:
        """Wait until a replica in `city` is warm, and report each of its states.

        Raises StartFailed with the last one, or with the reason why there is none.
        """
        last_line = ""
        try:
            async with asyncio.timeout(WARM_TIMEOUT_S):
                while True:
                    here = [row for row in await self.placements() if row["pop"] == city.pop]
                    line = "; ".join(map(_progress, here)) or await self._unmet()
                    if line and line != last_line:
                        self._say(line)
                        last_line = line
                    if any(row["state"] == "warm" for row in here):
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError as error:
            raise StartFailed(
                f"no replica in {city.name} is warm after {WARM_TIMEOUT_S:g} s: "
                f"{last_line or 'none was placed there'}"
            ) from error

    async def wait_routed(self) -> None:
        """Wait until every router has the route table that the scheduler published last."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                status = await self.ask("GET", "/v1/status")
                rows = await self.ask("GET", "/v1/routers")
                if all(r["generation"] >= status["route_generation"] for r in rows["data"]):
                    return
                await asyncio.sleep(0.2)

    async def placements(self) -> list[dict[str, Any]]:
        """Return the placements of the demo's deployment."""
        query = {"deployment_id": model.DEPLOYMENT}
        answer = await self.ask("GET", "/v1/placements", query=query)
        rows: list[dict[str, Any]] = answer["data"]
        return rows

    async def _unmet(self) -> str:
        """Return what keeps the scheduler from placing replicas; empty if nothing does."""
        row = await self.ask("GET", f"/v1/deployments/{model.DEPLOYMENT}")
        return "; ".join(row["unmet"])

    async def ask(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> Any:
        """Send a request to the admin API."""
        return await asyncio.to_thread(self.api.ask, method, path, body, query=query)

    async def down(self) -> None:
        """Stop all processes, including engines that an agent left running."""
        await self.processes.stop_all(lambda names: self._say(f"stopping {names}"))
        if self._owns_state:
            await asyncio.to_thread(kill_leftovers, self.state)
        self._state_lock.close()

    def _claim_state(self) -> None:
        try:
            self._state_lock.enter_context(lock_state_folder(self.state))
        except ConfigError as error:
            raise StartFailed(str(error)) from error
        self._owns_state = True
        kill_leftovers(self.state)
        for host, port in layout.addresses():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise StartFailed(
                        f"cannot use {host}:{port}: {error.strerror}; stop the other fleet first"
                    ) from error
        for path in (*self.state.iterdir(), self._database):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        (self.state / "logs").mkdir(parents=True)

    async def _start_database(self) -> None:
        try:
            binaries = await asyncio.to_thread(find_binaries)
        except PostgresError as error:
            raise StartFailed(str(error)) from error
        self._say(f"postgres: {binaries}, data in {self._database}")
        arguments = ("scheduler", "postgres", "--state", str(self._database))
        await self.processes.start("postgres", arguments)
        log = self.state / "logs" / "postgres.log"

        async def is_ready() -> bool:
            return "postgresql://" in log.read_text()

        await self.processes.wait("postgres", is_ready, START_TIMEOUT_S)

    async def _start_scheduler(self) -> None:
        self._say(f"scheduler: admin API at {layout.admin_url()}")
        url = f"postgresql://isochrone@/isochrone?host={self._database}"
        write_atomic(self.state / "admin.token", self.token.encode())
        config = self.state / "scheduler.toml"
        write_atomic(config, layout.scheduler_config(self.state, url).encode())
        await self.processes.start("scheduler", ("scheduler", "serve", "--config", str(config)))

        async def is_acting() -> bool:
            try:
                return bool((await self.ask("GET", "/v1/status"))["acting"])
            except AdminError:
                return False

        await self.processes.wait("scheduler", is_acting, START_TIMEOUT_S)

    async def _create_pops(self) -> None:
        for city in CITIES:
            body = {
                "city": city.name,
                "country": city.country,
                "latitude": city.latitude,
                "longitude": city.longitude,
            }
            await self.ask("PUT", f"/v1/pops/{city.pop}", body)

    async def _start_nodes_and_routers(self) -> None:
        ports = [f"{layout.NODE_PORT}:{layout.NODE_PORT}"] * len(CITIES)
        await self.processes.start("wan", ("ops.fleet.wan", *ports))
        for city in CITIES:
            self._say(f"{city.pop}: node and router in {city.name}")
            await self._join_token(city, "agent", self.state / f"node-{city.pop}.token")
            config = self.state / f"node-{city.pop}.toml"
            write_atomic(config, layout.node_config(self.state, city).encode())
            await self.processes.start(f"node-{city.pop}", ("nodeagent", "--config", str(config)))
            await self._join_token(city, "router", self.state / f"router-{city.pop}.token")
            config = self.state / f"router-{city.pop}.toml"
            write_atomic(config, layout.router_config(self.state, city).encode())
            await self.processes.start(f"router-{city.pop}", ("router", "--config", str(config)))
        for city in CITIES:
            node = f"http://{city.listen_host}:{layout.NODE_PORT}/healthz"
            await self._wait_healthy(f"node-{city.pop}", node)
            await self._wait_healthy(f"router-{city.pop}", f"{layout.endpoint(city)}/healthz")

    async def _join_token(self, city: City, role: str, file: Path) -> None:
        created = await self.ask("POST", "/v1/join-tokens", {"pop": city.pop, "role": role})
        write_atomic(file, created["token"].encode())

    async def _wait_healthy(self, name: str, url: str) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http:

            async def is_healthy() -> bool:
                try:
                    async with http.get(url) as response:
                        return response.status == 200
                except (aiohttp.ClientError, OSError, TimeoutError):
                    return False

            await self.processes.wait(name, is_healthy, START_TIMEOUT_S)


def _progress(row: dict[str, Any]) -> str:
    reason = row["state_reason"] or row["reason"]
    return f"{row['replica_id']} on {row['node_id']}: {row['state']} ({reason})"


def kill_leftovers(state: Path) -> None:
    """Kill the processes of an earlier run: Python and Postgres with `state` in their arguments."""
    mark = f"{state}/".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        with suppress(OSError):
            command_line = path.read_bytes()
            program = Path(os.fsdecode(command_line.partition(b"\0")[0])).name
            # Other programs, such as a pager on a log, may name the folder too.
            is_ours = mark in command_line and program.startswith(("python", "postgres"))
            if is_ours and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
