"""A rolling upgrade, driven: `python -m tests.system.upgrade OLD_CHECKOUT`, from this checkout.

A fleet of the release before, with TLS on, is brought to this one in the order that README tells,
while the OpenAI SDK asks for numbered tokens in both cities. On the way a rollout that the release
before began comes to its end, a node is drained, and keys are made and revoked. The last city is
upgraded with schedulers and Postgres gone, from what the release before left on its disks. Prints
what it does, and ends in error where an answer was not whole or was not booked.
"""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import openai

from nodeagent.config import OLD_NAMES
from tests.postgres import a_folder
from tests.system.harness import CITIES, ROOT, Fleet, until
from tests.system.tls_fleet import TlsFleet

STEPS = [{"share": 0.5}, {"share": 1.0}]
BOUNDS = {"attempts_min": 20, "step_min_s": 0.0, "ttft_ratio": 10, "itl_ratio": 10,
          "error_ratio": 0.4}  # fmt: skip
PARTS = ("scheduler-a", "scheduler-b", *(f"{kind}-{pop}" for kind in ("node", "router")
         for pop in CITIES))  # fmt: skip
STREAMS = 2  # what two replicas carry: none begins or ends but by an order
TOKENS = 30


def old_name(setting: str) -> str:
    """Return the name of a node's setting that both releases read."""
    return next((old for old, new in OLD_NAMES.items() if new == setting), setting)


class Mixed(TlsFleet):
    """A fleet in which each process runs from the checkout of its own release."""

    def __init__(self, folder: Path, old: Path) -> None:
        super().__init__(folder)
        for part in PARTS:
            self._runs_from(part, old)
        self.listen_port = old_name("listen_port")
        for pop in CITIES:
            node = self.settings[f"node-{pop}"]
            node[old_name("listen_tls")] = node.pop("listen_tls")
            node["keep_engines_on_stop"] = True

    def _runs_from(self, part: str, checkout: Path) -> None:
        # Without the working directory first, what is imported is what is named.
        self.environment[part] = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(checkout)}

    async def upgrade(self, part: str) -> None:
        """Stop a part, and start it from this checkout."""
        print(f"  {part}", flush=True)
        await self.processes.stop(part)
        self._runs_from(part, ROOT)
        kind, _, name = part.partition("-")
        if kind == "scheduler":
            await self.start_scheduler(name)
        elif kind == "node":
            await self.start_node(name)
        else:
            await self.start_router(name)

    async def one_acts(self) -> bool:
        return any([await self.acts(name) for name in ("a", "b")])


class Users:
    """Send requests continuously with the OpenAI SDK; use the other city if a router is down."""

    def __init__(self, fleet: Fleet) -> None:
        self.whole: dict[str, int] = {}
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._fleet = fleet
        self._stopping = asyncio.Event()

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator["Users"]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(self._ask_on(number))
            try:
                yield self
            finally:
                self._stopping.set()

    async def more(self, answers: int, timeout_s: float = 60.0) -> None:
        """Wait until so many further answers have come."""
        wanted = len(self.whole) + answers

        async def came() -> bool:
            return len(self.whole) >= wanted

        await until(f"{answers} more answers", came, timeout_s)

    async def _ask_on(self, number: int) -> None:
        pops = [*CITIES] if number % 2 else [*reversed(CITIES)]
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    openai.AsyncOpenAI(
                        base_url=f"{self._fleet.endpoint(pop)}/v1",
                        api_key=self._fleet.key,
                        max_retries=0,
                    )
                )
                for pop in pops
            ]
            while not self._stopping.is_set():
                began = asyncio.get_running_loop().time()
                try:
                    try:
                        await self._ask(clients[0])
                    except openai.APIConnectionError:
                        # As anycast or DNS would do it.
                        await self._ask(clients[1])
                except Exception as error:
                    self._fail(repr(error)[:300])
                self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - began)

    async def _ask(self, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.with_raw_response.create(
            model="mock",
            messages=[{"role": "user", "content": "count"}],
            max_tokens=TOKENS,
            stream=True,
        )
        text = ""
        async for chunk in answer.parse():
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if text.split() != [f"t{n}" for n in range(TOKENS)]:
            self._fail(f"not whole: {text[-40:]!r}, {len(text.split())} tokens")
        self.whole[answer.headers["x-request-id"]] = TOKENS

    def _fail(self, what: str) -> None:
        print("    !", what, flush=True)
        self.wrong.append(what)


async def drive(fleet: Mixed) -> None:
    """Upgrade a fleet of the previous release to this one, process by process."""
    await fleet.up()
    await fleet.start_scheduler("b")
    await fleet.deploy(replicas=2, replicas_max=3, keep_warm=[*CITIES])
    users = Users(fleet)
    async with users.asking():
        await users.more(20)
        rollout = await begin_rollout(fleet)
        print("every scheduler", flush=True)
        for name in ("b", "a"):
            await fleet.upgrade(f"scheduler-{name}")
            await until("a scheduler acts", fleet.one_acts)
            await users.more(20)
        print("a city", flush=True)
        for part in ("node-ams", "router-ams"):
            await fleet.upgrade(part)
            await users.more(20)
        await a_key_comes_and_goes(fleet)
        await roll_out(fleet, rollout)
        await drain(fleet)
        await users.more(20)
        engines = fleet.engine_pids()
        print("the other city, with schedulers and Postgres gone", flush=True)
        for part in ("scheduler-a", "scheduler-b", "postgres"):
            await fleet.kill(part)
        for part in ("router-sin", "node-sin"):
            await fleet.upgrade(part)
            await users.more(20)
        print("and back", flush=True)
        await fleet.start_postgres()
        for name in ("a", "b"):
            await fleet.start_scheduler(name)
        await until("a scheduler acts", fleet.one_acts)
        await users.more(20)
    assert fleet.engine_pids() == engines, "an engine was started again"
    await until("all that was said is booked, once", lambda: is_booked(fleet, users))
    print(f"{len(users.whole)} answers, the slowest in {users.slowest_s:.1f} s", flush=True)
    assert not users.wrong, users.wrong


async def begin_rollout(fleet: Fleet) -> str:
    deployment = await fleet.ask("GET", "/v1/deployments/mock")
    body = {
        "engine": {**deployment["engine"], "options": {"itl_ms": "11"}},
        "steps": STEPS,
        "bounds": BOUNDS,
    }
    made = await fleet.ask("POST", "/v1/deployments/mock/rollouts", body)
    rollout = str(made["rollout_id"])
    await fleet.ask("POST", f"/v1/rollouts/{rollout}/pause", {})
    return rollout


async def roll_out(fleet: Fleet, rollout: str) -> None:
    """Wait for the end of a rollout that the previous release started."""
    print("the rollout, and a drain", flush=True)
    await fleet.ask("POST", f"/v1/rollouts/{rollout}/resume", {})

    async def is_over() -> Any:
        row = await fleet.ask("GET", f"/v1/rollouts/{rollout}")
        return row if row["state"] not in ("running", "paused") else None

    row = await until("the rollout ends", is_over, 90.0)
    assert row["state"] == "done", row
    await until("the new version is all there is", lambda: are_all_warm(fleet, version=2))


async def drain(fleet: Fleet) -> None:
    """Drain and undrain the node that still runs the previous release."""
    await fleet.ask("POST", "/v1/nodes/sin-1/drain", {})
    await until("nothing is left on it", lambda: is_left(fleet, "sin-1"))
    await fleet.ask("POST", "/v1/nodes/sin-1/undrain", {})
    await until("it serves again", lambda: serves(fleet, "sin-1"))
    await fleet.routers_know()


async def a_key_comes_and_goes(fleet: Fleet) -> None:
    """Create and revoke a key: routers of both releases must apply both."""
    made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "another"})

    async def are_all(allowed: bool) -> bool:
        found = []
        for pop in CITIES:
            sdk = openai.AsyncOpenAI(base_url=f"{fleet.endpoint(pop)}/v1", api_key=made["key"])
            async with sdk:
                try:
                    await sdk.models.list()
                    found.append(True)
                except openai.AuthenticationError:
                    found.append(False)
        return found == [allowed] * len(CITIES)

    await until("both routers take the key", lambda: are_all(True), 10.0)
    await fleet.ask("DELETE", f"/v1/keys/{made['key_id']}")
    await until("neither does", lambda: are_all(False), 10.0)


async def placements(fleet: Fleet) -> list[Any]:
    return list((await fleet.ask("GET", "/v1/placements"))["data"])


async def are_all_warm(fleet: Fleet, version: int) -> bool:
    return all(
        (row["version"], row["state"], row["ending"]) == (version, "warm", False)
        for row in await placements(fleet)
    )


async def is_left(fleet: Fleet, node: str) -> bool:
    return all(row["node_id"] != node for row in await placements(fleet))


async def serves(fleet: Fleet, node: str) -> bool:
    return not await is_left(fleet, node) and await are_all_warm(fleet, version=2)


async def is_booked(fleet: Fleet, users: Users) -> bool:
    connection = await asyncpg.connect(fleet.dsn())
    rows = await connection.fetch("SELECT request_id, output_tokens FROM usage")
    await connection.close()
    booked = [(row["request_id"], row["output_tokens"]) for row in rows]
    return len(booked) == len(dict(booked)) and users.whole.items() <= dict(booked).items()


async def main(old: Path) -> None:
    folder = a_folder("iso-")
    fleet = Mixed(folder, old)
    try:
        await drive(fleet)
    finally:
        await fleet.down()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve()))
