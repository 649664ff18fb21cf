"""A whole fleet of real processes on loopback, with mock engines, for fault injection."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from isochrone.cli.client import AdminClient, AdminError
from isochrone.cli.manifest import artifact_of
from isochrone.service.files import write_atomic
from tests.ports import free_port
from tests.postgres import a_folder, copy_new_database
from tests.system.forked_services import ForkedServices
from tests.system.holdings import Holdings, holdings_of
from tests.unit_filter import unit_path

ROOT = Path(__file__).parents[2]
CITIES = {"ams": ("NL", 52.3, 4.8), "sin": ("SG", 1.35, 104.0)}
LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 60.0
STEP_S = 0.05
STEP_MAX_S = 0.25
LEASE_S = 8.0
"""Longer than a shared machine may stall, so that a stall causes no takeover."""

LAST_LINES = 60
STANDING: list["Fleet"] = []
"""The fleets that are running now, whose logs are shown when a test fails."""


async def until(
    what: str, condition: Callable[[], Awaitable[Any]], timeout_s: float = READY_TIMEOUT_S
) -> Any:
    """Wait until `condition` returns a true value, and return it. Raises AssertionError.

    The time is counted in steps, not by a clock: while the machine stalls, the awaited processes
    stall too and lose no time. What takes long is looked at less often: each look costs the fleet
    some processor time, too. A scheduler that cannot answer, because its database stalls, is asked
    again.
    """
    steps = asyncio.create_task(_steps(timeout_s))
    pause_s = STEP_S
    refused: AdminError | None = None
    try:
        while True:
            try:
                if found := await condition():
                    return found
            except AdminError as error:
                refused = error
            if steps.done():
                raise AssertionError(f"not within {timeout_s:g} s: {what}") from refused
            await asyncio.sleep(pause_s)
            pause_s = min(STEP_MAX_S, 1.1 * pause_s)
    finally:
        steps.cancel()


async def _steps(timeout_s: float) -> None:
    for _ in range(ceil(timeout_s / STEP_S)):
        await asyncio.sleep(STEP_S)


def last_words(folder: Path) -> str:
    """Return the last lines of each log of the fleet in a folder, and the time."""
    words = [f"at {datetime.now():%H:%M:%S}"]
    for pattern in ("logs/*.log", "node-*/engines/*/engine.log"):
        for path in sorted(folder.glob(pattern)):
            with suppress(FileNotFoundError):  # the log of an engine that was stopped
                lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
                words += [f"--- {path.relative_to(folder)}", *(line[:600] for line in lines)]
    return "\n".join(words)


def node_process(pop: str, number: int) -> str:
    """Return the name of the process of a PoP's node with this number."""
    return f"node-{pop}" if number == 1 else f"node-{pop}-{number}"


def postgres_process(database: str) -> str:
    """Return the name of the process that serves a database: "postgres" for the first."""
    return f"postgres{database.removeprefix('pg')}"


class Fleet:
    """Two schedulers on one Postgres, a node and a router in each of two PoPs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(24)
        self.key = self.other_key = ""
        """Keys of two tenants."""
        self.baseline: dict[tuple[str, int], Holdings] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        """By process: settings that override its configuration file."""
        self.environment: dict[str, dict[str, str]] = {}
        self.listen_port = "listen_port"
        """What the nodes call this setting."""
        self.prefixes: dict[str, tuple[str, ...]] = {}
        """By process: the command that runs it, for example in a network namespace."""
        self.databases = ["pg"]
        """The folders of the Postgres servers, of which one is the primary."""
        self.hosts: dict[str, str] = {}
        """By process: the address at which this process reaches it, if not 127.0.0.1."""
        self.processes = ForkedServices(folder / "logs", ROOT)
        self.ports = {
            f"{kind}-{name}": free_port()
            for kind, name in (
                *(("admin", s) for s in ("a", "b")),
                *(("control", s) for s in ("a", "b")),
                *((kind, pop) for kind in ("node", "router") for pop in CITIES),
            )
        }
        (folder / "logs").mkdir()

    def run_under_unit_filters(self) -> None:
        """Let services make only the system calls that their systemd units allow.

        Where systemd-analyze is not installed, they make any.
        """
        if shutil.which("systemd-analyze") is None:
            return
        for kind, service in (
            ("scheduler", "scheduler"),
            ("node", "nodeagent"),
            ("router", "router"),
        ):
            prefix = (sys.executable, "-m", "tests.unit_filter", str(unit_path(service)))
            for name in ("a", "b") if kind == "scheduler" else CITIES:
                self.prefixes[f"{kind}-{name}"] = prefix

    def api(self, scheduler: str = "a") -> AdminClient:
        return AdminClient(self.admin_url(scheduler), self.token)

    def admin_url(self, scheduler: str = "a") -> str:
        """Return the address of a scheduler's admin API."""
        host = self.hosts.get(f"scheduler-{scheduler}", LOOPBACK)
        return f"http://{host}:{self.ports[f'admin-{scheduler}']}"

    def schedulers_started(self) -> list[str]:
        """Return the schedulers that run."""
        return [name for name in ("a", "b") if f"scheduler-{name}" in self.processes.names()]

    async def ask(self, method: str, path: str, body: Any = None, *, of: str = "a") -> Any:
        return await asyncio.to_thread(self.api(of).ask, method, path, body)

    async def tell(self, method: str, path: str, body: Any) -> Any:
        """Return the answer to what every fleet begins with: no stall of its database ends it."""

        async def answer() -> tuple[Any]:
            return (await self.ask(method, path, body),)

        (answered,) = await until(f"{method} {path}", answer)
        return answered

    def endpoint(self, pop: str) -> str:
        return self.url(f"router-{pop}")

    def url(self, name: str) -> str:
        """Return the address of a router or node."""
        return f"http://{self.hosts.get(name, LOOPBACK)}:{self.ports[name]}"

    async def start_postgres(self, database: str = "pg") -> None:
        name = postgres_process(database)
        log = self.folder / "logs" / f"{name}.log"
        log.unlink(missing_ok=True)
        if not (self.folder / database).exists():
            await asyncio.to_thread(copy_new_database, self.folder / database)
        await self.processes.start(
            name, ("scheduler", "postgres", "--state", str(self.folder / database))
        )

        async def is_ready() -> bool:
            return "postgresql://" in log.read_text()

        await self.processes.wait(name, is_ready, READY_TIMEOUT_S)

    def env(self, name: str) -> dict[str, str]:
        """Return the overridden settings of a process as environment variables."""
        kind = {"scheduler": "SCHEDULER", "node": "NODE", "router": "ROUTER"}[name.split("-")[0]]
        overrides = self.settings.get(name, {}).items()
        return self.environment.get(name, {}) | {
            f"ISOCHRONE_{kind}_{field.upper()}": text if isinstance(text, str) else json.dumps(text)
            for field, text in overrides
        }

    async def start_scheduler(self, name: str) -> None:
        config = self.folder / f"scheduler-{name}.toml"
        write_atomic(self.folder / "admin.token", self.token.encode())
        text = (
            f'name = "{name}"\n'
            f'database_url = "{self.dsn()}"\n'
            f'authority = "{self.folder}/ca"\n'
            f'admin_token_file = "{self.folder}/admin.token"\n'
            f"admin_port = {self.ports[f'admin-{name}']}\n"
            f"control_port = {self.ports[f'control-{name}']}\n"
            f"lease_ttl_s = {LEASE_S}\nlease_renew_s = 0.5\nplace_interval_s = 1.0\n"
            "publish_interval_s = 0.5\nroll_interval_s = 1.0\nhear_first_s = 3.0\n"
        )
        write_atomic(config, text.encode())
        part = f"scheduler-{name}"
        await self.processes.start(
            part,
            ("scheduler", "serve", "--config", str(config)),
            self.env(part),
            self.prefixes.get(part, ()),
        )
        await until(f"scheduler {name} answers", lambda: self._status(name))

    async def _status(self, name: str) -> Any:
        try:
            return await self.ask("GET", "/v1/status", of=name)
        except AdminError:
            return None

    def dsn(self, *databases: str) -> str:
        """Return the connection string of these databases, or of all: the writable one counts."""
        folders = [f"{self.folder}/{name}" for name in databases or self.databases]
        writable = "&target_session_attrs=read-write" if len(folders) > 1 else ""
        return f"postgresql://isochrone@/isochrone?host={','.join(folders)}{writable}"

    def schedulers(self) -> str:
        urls = [f"http://127.0.0.1:{self.ports[f'control-{name}']}" for name in ("a", "b")]
        return json.dumps(urls)

    async def start_node(self, pop: str, number: int = 1, **fields: Any) -> None:
        name = node_process(pop, number)
        self.ports.setdefault(name, free_port())
        settings: dict[str, Any] = {"cpu_memory_bytes": 4 << 30, **fields}
        extra = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        state = self.folder / name
        token_file = self.folder / f"{name}.token"
        if not (state / "identity.json").exists():
            body = {"pop": pop, "role": "agent", "name": f"{pop}-{number}"}
            made = await self.tell("POST", "/v1/join-tokens", body)
            write_atomic(token_file, made["token"].encode())
        text = (
            f'name = "{pop}-{number}"\nschedulers = {self.schedulers()}\nstate = "{state}"\n'
            f'address = "http://127.0.0.1:{self.ports[name]}"\n'
            f"{self.listen_port} = {self.ports[name]}\n"
            f'join_token_file = "{token_file}"\n{extra}'
            "canary_interval_s = 1.0\ndrain_timeout_s = 5.0\nprivate_sources = true\n"
        )
        write_atomic(self.folder / f"{name}.toml", text.encode())
        await self.processes.start(
            name,
            ("nodeagent", "--config", f"{self.folder}/{name}.toml"),
            self.env(name),
            self.prefixes.get(name, ()),
        )
        await until(f"{name} answers", lambda: self.is_up(name, "/healthz"))

    async def start_router(self, pop: str) -> None:
        name = f"router-{pop}"
        state = self.folder / name
        env = self.env(name)
        if not (state / "identity.json").exists():
            body = {"pop": pop, "role": "router", "name": name}
            made = await self.tell("POST", "/v1/join-tokens", body)
            write_atomic(self.folder / f"{name}.token", made["token"].encode())
        text = (
            f'name = "{name}"\nschedulers = {self.schedulers()}\nstate_folder = "{state}"\n'
            f'join_token_file = "{self.folder}/{name}.token"\n'
            f"port = {self.ports[name]}\nprobe_interval_s = 0.5\ndemand_interval_s = 1.0\n"
            "usage_interval_s = 0.5\nusage_resend_s = 2.0\n"
            # One process, because session affinity and cache knowledge are per process.
            "drain_timeout_s = 5.0\nprocesses = 1\n"
        )
        write_atomic(self.folder / f"{name}.toml", text.encode())
        await self.processes.start(
            name,
            ("router", "--config", f"{self.folder}/{name}.toml"),
            env,
            self.prefixes.get(name, ()),
        )
        await until(f"{name} answers", lambda: self.is_up(name, "/healthz"))

    async def is_up(self, name: str, path: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=2.0)
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(f"{self.url(name)}{path}") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def up(self) -> None:
        await self.start_postgres()
        await self.start_scheduler("a")
        await until("scheduler a is active", self.acts)
        for pop, (country, latitude, longitude) in CITIES.items():
            body = {
                "city": pop, "country": country, "latitude": latitude, "longitude": longitude,
            }  # fmt: skip
            await self.tell("PUT", f"/v1/pops/{pop}", body)
        async with asyncio.TaskGroup() as tasks:
            for pop in CITIES:
                tasks.create_task(self.start_node(pop))
                tasks.create_task(self.start_router(pop))
        await until("scheduler a has all reports", self.has_heard_all)
        self.key, self.other_key = [
            (await self.tell("POST", "/v1/keys", {"tenant_id": tenant}))["key"]
            for tenant in ("test", "other")
        ]

    async def has_heard_all(self) -> bool:
        """Return True if every router is ready and every node has reported its devices."""
        status = await self.ask("GET", "/v1/status")
        nodes = (await self.ask("GET", "/v1/nodes"))["data"]
        reported = sum(bool(node["devices"]) for node in nodes)
        return bool(status["routers_ready"] == reported == len(CITIES))

    async def acts(self, name: str = "a") -> bool:
        """Return True if a scheduler is running and active."""
        status = await self._status(name)
        return status is not None and bool(status["acting"])

    async def deploy(
        self, replicas: int = 2, options: dict[str, str] | None = None, **policy: Any
    ) -> None:
        """Deploy the mock model with `replicas` replicas, and wait until the routers have them."""
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "m.gguf").write_bytes(b"GGUF")
        artifact = artifact_of(folder, f"file:{folder}")
        model = {
            "model_id": "mock",
            "architecture": "mock",
            "artifact": msgspec.to_builtins(artifact),
            "context_tokens": 100_000,
            "weights_bytes": 1000,
        }
        await self.tell("PUT", "/v1/models/mock", model)
        engine = {
            "driver": "mock",
            "kv_memory_bytes": 1_000_000,
            "context_tokens_max": 100_000,
            "options": options or {"itl_ms": "10"},
        }
        # At least one per city if there are enough: a node that is silent for a moment gets none,
        # and the planner would not correct that for minutes.
        cities = list(CITIES) if replicas >= len(CITIES) else []
        counts = {"replicas_min": replicas, "replicas_max": replicas}
        policy = {**counts, "keep_warm": cities, **policy}
        await self.tell(
            "POST",
            "/v1/deployments",
            {"deployment_id": "mock", "model_id": "mock", "engine": engine, "policy": policy},
        )

        async def stands() -> bool:
            return await self.is_warm(replicas, cities) and self.engine_processes() == replicas

        await until(f"{replicas} warm, one in each city, and no more", stands)
        await self.routers_know()

    async def is_warm(self, replicas: int, cities: Collection[str] = (), *, of: str = "a") -> bool:
        """Return True if `replicas` are warm, with at least one in each of `cities`."""
        rows = (await self.ask("GET", "/v1/placements", of=of))["data"]
        warm = [row["pop"] for row in rows if row["state"] == "warm" and not row["ending"]]
        return len(warm) >= replicas and set(warm).issuperset(cities)

    async def until_warm(self, timeout_s: float, replicas: int = 1) -> None:
        """Wait until `replicas` are warm and the routers know them.

        While a large engine starts, a small machine has no time for the scheduler's database.
        """

        async def is_warm() -> bool:
            with suppress(AdminError):
                return await self.is_warm(replicas)
            return False

        await until(f"{replicas} warm", is_warm, timeout_s)
        await self.routers_know()

    async def new_key(self, tenant: str) -> str:
        """Create a key, and wait until every router knows it: it is published a moment later."""
        key: str = (await self.ask("POST", "/v1/keys", {"tenant_id": tenant}))["key"]

        async def is_known() -> bool:
            async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:
                for pop in CITIES:
                    url = f"{self.endpoint(pop)}/v1/chat/completions"
                    async with http.post(url, json={}) as response:
                        if response.status == 401:
                            return False
            return True

        await until("routers know the new key", is_known)
        return key

    async def routers_know(self) -> None:
        """Wait until every router has the route table that is published now.

        What changed a moment ago may not be published yet.
        """
        published = (await self.tell("GET", "/v1/status", None))["route_generation"]

        async def were_told() -> bool:
            rows = (await self.ask("GET", "/v1/routers"))["data"]
            return all(row["generation"] >= published for row in rows)

        await until("routers have the route table", were_told)

    def engine_pids(self) -> dict[str, int]:
        """Return the pid of each engine that has started, by node name."""
        found = {}
        for path in self.folder.glob("node-*/engines/*/process.json"):
            with suppress(OSError, msgspec.DecodeError):
                # 0 until the engine has started: a signal to it would end this process's own group.
                if pid := msgspec.json.decode(path.read_bytes())["pid"]:
                    found[path.parts[-4]] = pid
        return found

    def engine_processes(self) -> int:
        """Count the running mock engine processes of this fleet."""
        mark = str(self.folder).encode()
        count = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes()
                count += b"nodeagent.mock" in command and mark in command
        return count

    def note_baseline(self) -> None:
        """Note the memory and the descriptors to which the processes must return."""
        self.baseline = holdings_of(self.processes)

    async def kill(self, name: str) -> None:
        """Kill a process by SIGKILL; for Postgres also the server below its launcher."""
        pid = self.processes.pid(name)
        if name == "postgres":
            lock = self.folder / "pg" / "data" / "postmaster.pid"
            server = int(lock.read_text().split()[0])
            os.kill(server, signal.SIGKILL)
        # The launcher may have seen its server's end, and ended, by now.
        with suppress(ProcessLookupError) if name == "postgres" else nullcontext():
            os.kill(pid, signal.SIGKILL)
        await self.processes.stop(name)

    def last_words(self) -> str:
        """Return the exited processes and the logs, before the folder is deleted."""
        ended = [f"{name} exited unexpectedly\n" for name in self.processes.ended()]
        return "".join(ended) + last_words(self.folder)

    async def down(self) -> None:
        await self.processes.stop_all(lambda names: None)
        mark = str(self.folder).encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)


@asynccontextmanager
async def a_fleet(
    *, comes_up: bool = True, in_memory: bool = True, make: Callable[[Path], Fleet] = Fleet
) -> AsyncIterator[Fleet]:
    """Start a fleet in a temporary folder, and stop it.

    `in_memory` is not for vLLM, which creates shared memory in /dev/shm: what is created beside an
    agent's folder is closed to its engines (`nodeagent/host/confinement.py`).
    """
    folder = a_folder("iso-", in_memory=in_memory)
    fleet = make(folder)
    STANDING.append(fleet)
    try:
        if comes_up:
            await fleet.up()
        yield fleet
    except BaseException:
        print(fleet.last_words())
        raise
    finally:
        STANDING.remove(fleet)
        await fleet.down()
        shutil.rmtree(folder, ignore_errors=True)
