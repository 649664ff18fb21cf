"""The invariants that must hold after any fault, once the load has ended.

What a scheduler has acknowledged is stored, and every router uses it (I1). No two schedulers have
acted in one epoch, and epochs only rose (I2). Every request has one end (I3). Tokens are contiguous
and of that request (I4 and I9, checked by the load: each answer has numbers of its own, and there
are two tenants). Usage equals the delivered tokens, once per request (I5). Nothing stays in flight,
and no process holds more descriptors than before (I6). Memory returns to its level (I7). No
operator action was needed (I8). No prompt or key is in a log, and no traceback of an error that is
not a fault's (I10).
"""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec

from tests.system.harness import CITIES, Fleet, until
from tests.system.holdings import holdings_of
from tests.system.load import PROMPT, Load, one_stream

MEMORY_GROWTH_MAX_KIB = 64 * 1024
DESCRIPTORS_GROWTH_MAX = 32
"""Idle connections come and go: so many more are no leak."""

ERRORS_OF_FAULTS = ("EpochLost", "NotActing", "PlannerFailed", "TimeoutError", "OSError")
PACKAGES_OF_FAULTS = ("asyncpg.", "aiohttp.", "Connection")
"""How the errors begin that a database, a peer or a disk causes, or a takeover."""


async def invariants(fleet: Fleet, load: Load) -> None:
    """Check all invariants of the fleet after `load` has ended."""
    assert load.count("broken") == 0, [e for e in load.ended if e.how == "broken"]
    await usage_is_whole(fleet, load)
    await acknowledged_keys_work(fleet, load)
    await until("nothing in flight", lambda: nothing_in_flight(fleet))
    now = holdings_of(fleet.processes)
    for process in fleet.baseline.keys() & now.keys():
        grown_kib = now[process].memory_kib - fleet.baseline[process].memory_kib
        assert grown_kib < MEMORY_GROWTH_MAX_KIB, f"{process[0]} grew by {grown_kib} KiB"
    await descriptors_are_as_before(fleet)
    check_epochs(fleet)
    check_logs(fleet, load)


async def usage_is_whole(fleet: Fleet, load: Load) -> None:
    """Wait until the usage of each answer is stored, once."""
    complete = {e.request_id: e.tokens for e in load.ended if e.how == "complete"}
    wrong: dict[str, tuple[int, int | None]] = {}

    async def is_whole() -> bool:
        nonlocal wrong
        try:
            connection = await asyncpg.connect(fleet.dsn(), timeout=2)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        rows = await connection.fetch("SELECT request_id, output_tokens FROM usage")
        await connection.close()
        known = {row["request_id"]: row["output_tokens"] for row in rows}
        wrong = {name: (n, known.get(name)) for name, n in complete.items() if known.get(name) != n}
        return not wrong

    try:
        await until("usage equals the delivered tokens of each request", is_whole)
    except AssertionError as error:
        raise AssertionError(
            f"{error}; delivered and recorded tokens: {list(wrong.items())[:5]}"
        ) from error


async def acknowledged_keys_work(fleet: Fleet, load: Load) -> None:
    """Check that each key whose creation was acknowledged is listed, and usable at each router."""
    acting = ""

    async def one_acts() -> bool:
        nonlocal acting
        for name in fleet.schedulers_started():
            if await fleet.acts(name):
                acting = name
                return True
        return False

    await until("a scheduler acts", one_acts)
    rows = await asyncio.to_thread(fleet.api(acting).list, "/v1/keys")
    lost = load.keys.keys() - {row["key_id"] for row in rows}
    assert not lost, f"keys are lost whose creation was acknowledged: {lost}"
    ends: list[str] = []
    timeout = aiohttp.ClientTimeout(total=60.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for pop in CITIES:
            for key_id, key in load.keys.items():

                async def works(pop: str = pop, key: str = key) -> bool:
                    ends.append((await one_stream(fleet, http, pop, 1, key)).how)
                    return ends[-1] == "complete"

                try:
                    await until(f"router-{pop} accepts key {key_id}", works)
                except AssertionError as error:
                    raise AssertionError(f"{error}; the last requests: {ends[-5:]}") from error


async def descriptors_are_as_before(fleet: Fleet) -> None:
    """Wait until no process has more open files than before."""
    more: dict[str, int] = {}

    async def none_has_more() -> bool:
        nonlocal more
        now = holdings_of(fleet.processes)
        more = {
            process[0]: now[process].descriptors - before.descriptors
            for process, before in fleet.baseline.items()
            if process in now
            and now[process].descriptors - before.descriptors > DESCRIPTORS_GROWTH_MAX
        }
        return not more

    try:
        await until("no process has more descriptors", none_has_more)
    except AssertionError as error:
        raise AssertionError(f"{error}: {more} more than before") from error


def check_epochs(fleet: Fleet) -> None:
    """Check by the schedulers' logs that each epoch had one of them, and followed the last."""
    acted: dict[int, str] = {}
    for path in sorted((fleet.folder / "logs").glob("scheduler-*.log")):
        epochs = [line["epoch"] for line in log_lines(path) if line.get("message") == "acting"]
        assert epochs == sorted(epochs), f"{path.stem} acted in the epochs {epochs}"
        for epoch in set(epochs):
            assert epoch not in acted, f"{acted[epoch]} and {path.stem} acted in epoch {epoch}"
            acted[epoch] = path.stem


def check_logs(fleet: Fleet, load: Load) -> None:
    """Check that no secret, prompt or unexpected error is in a log."""
    secrets = salt_secrets(fleet)
    keys = [key.split("_")[2] for key in (fleet.key, fleet.other_key, *load.keys.values()) if key]
    for path in (fleet.folder / "logs").glob("*.log"):
        text = path.read_text(errors="replace")
        assert not any(form in text for form in secrets), f"a salt's secret is in {path.name}"
        assert not any(key in text for key in keys), f"a key's secret is in {path.name}"
        assert PROMPT not in text, f"a prompt is in {path.name}"
        assert "\nTraceback (most recent call last)" not in text, f"{path.name}: {text[-4000:]}"
        for line in log_lines(path):
            error = last_error(str(line.get("exception", "")))
            name = error.partition(":")[0]
            is_of_a_fault = name.endswith(ERRORS_OF_FAULTS) or name.startswith(PACKAGES_OF_FAULTS)
            assert not error or is_of_a_fault, f"{path.name}: {line}"


def last_error(traceback: str) -> str:
    """Return the line of a traceback that names its last error, above what explains it."""
    lines = [x for x in traceback.splitlines() if x and not x.startswith(("DETAIL:", "HINT:"))]
    return lines[-1] if lines else ""


def log_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a service's log."""
    for line in path.read_bytes().splitlines():
        if line.startswith(b"{"):
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError:  # the last one of a process that was killed
                continue


def salt_secrets(fleet: Fleet) -> set[str]:
    """Return every form in which the secrets of the nodes' cache salts might be printed."""
    forms = set()
    for path in fleet.folder.glob("node-*/*cache_salt.key"):
        secret = path.read_bytes()
        forms |= {secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]}
    return forms


async def nothing_in_flight(fleet: Fleet) -> bool:
    async with aiohttp.ClientSession() as http:
        for pop in CITIES:
            url = f"{fleet.url(f'node-{pop}')}/metrics"
            try:
                async with http.get(url) as response:
                    lines = (await response.text()).splitlines()
            except (aiohttp.ClientError, OSError):
                return False
            gauges = [x for x in lines if x.startswith("isochrone_node_in_flight_tokens{")]
            if any(float(line.rpartition(" ")[2]) != 0 for line in gauges):
                return False
    return True
