"""Reads the metrics of a fleet's processes."""

import aiohttp

from tests.system.harness import Fleet


async def metric(fleet: Fleet, part: str, name: str, without: str = "{}") -> float:
    """Return the sum of a metric over its labels, except those of rows that contain `without`."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{fleet.url(part)}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in found if without not in line)
