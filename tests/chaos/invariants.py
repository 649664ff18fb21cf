"""The invariants that must hold after any fault, once the load has ended.

Every request has one end (I3). Tokens are contiguous (I4, checked by the load). Usage equals the
delivered tokens, once per request (I5). Nothing stays in flight (I6). Memory returns to its level
(I7). No operator action was needed (I8). No prompt or key is in a log (I10).
"""

import base64

import aiohttp
import asyncpg

from tests.system.harness import CITIES, Fleet, until
from tests.system.load import PROMPT, Load

MEMORY_GROWTH_MAX_KIB = 64 * 1024


async def invariants(fleet: Fleet, load: Load) -> None:
    """Check all invariants of the fleet after `load` has ended."""
    assert load.count("broken") == 0, [e for e in load.ended if e.how == "broken"]
    complete = {e.request_id: e.tokens for e in load.ended if e.how == "complete"}

    wrong: dict[str, tuple[int, int | None]] = {}

    async def usage_is_whole() -> bool:
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
        await until("usage equals the delivered tokens of each request", usage_is_whole)
    except AssertionError as error:
        raise AssertionError(
            f"{error}; delivered and recorded tokens: {list(wrong.items())[:5]}"
        ) from error
    await until("nothing in flight", lambda: nothing_in_flight(fleet))
    now_kib = fleet.memory_kib()
    for process, before_kib in fleet.baseline_kib.items():
        grown_kib = now_kib.get(process, 0) - before_kib
        assert grown_kib < MEMORY_GROWTH_MAX_KIB, f"{process[0]} grew by {grown_kib} KiB"
    secrets = salt_secrets(fleet)
    for path in (fleet.folder / "logs").glob("*.log"):
        text = path.read_text(errors="replace")
        assert not any(form in text for form in secrets), f"a salt's secret is in {path.name}"
        assert fleet.key.split("_")[2] not in text, f"a key's secret is in {path.name}"
        assert PROMPT not in text, f"a prompt is in {path.name}"


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
