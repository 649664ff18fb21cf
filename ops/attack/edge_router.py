"""A router process for attack scripts: two tenants, one of them limited, before a fake node."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import psutil

from isochrone.service import files
from isochrone.service.trust.identity import save_identity
from isochrone.wire import codec
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.routes import KeyLimits
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_key, a_route, a_table, an_identity
from tests.integration.router.test_process import a_process
from tests.ports import free_port

OTHER_KEY: Final = format_key(KeyId("o" * 12), b"\x02" * 32)
LIMITED_KEY: Final = format_key(KeyId("l" * 12), b"\x03" * 32)
PROBES: Final = 400
PROBE_INTERVAL_S: Final = 0.05


class EdgeRouter(NamedTuple):
    """A running router process: `KEY` attacks, `LIMITED_KEY` may send 1 request a minute."""

    port: int
    process: psutil.Process

    @property
    def url(self) -> str:
        """The URL of chat completions."""
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"


@asynccontextmanager
async def open_edge_router() -> AsyncIterator[EdgeRouter]:
    """Run a router with one process and the default limits."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, node = Path(name), free_port(), FakeNode("n1")
        async with open_node(node):
            save_identity(folder / "state", an_identity(folder))
            others = [
                msgspec.structs.replace(a_key(OTHER_KEY), tenant_id=TenantId("quiet")),
                a_key(LIMITED_KEY, limits=KeyLimits(requests_per_min=1)),
            ]
            table = a_table([a_route(node, tokens_in_flight_max=10**7)], keys=[a_key(), *others])
            files.write_snapshot(folder / "state/table.snapshot", codec.encode(table))
            config = folder / "router.toml"
            config.write_text(
                f'state_folder = "{folder}/state"\nport = {port}\nprocesses = 1\n'
                'schedulers = ["http://127.0.0.1:9"]\nsource_address = "127.0.0.1"\n'
            )
            async with a_process(config, port) as process:
                yield EdgeRouter(port, psutil.Process(process.pid))


async def measure_ttft_s(router: EdgeRouter) -> list[float]:
    """Send a small tenant's requests at a constant rate; return times to first token, sorted."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "stream": True,
    }

    async def probe(http: aiohttp.ClientSession) -> float:
        began_s = time.perf_counter()
        headers = {"authorization": f"Bearer {OTHER_KEY}"}
        try:
            async with http.post(router.url, json=body, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"cannot probe: status {response.status}")
                await response.content.readuntil(b"t0")
                return time.perf_counter() - began_s
        except TimeoutError:
            return time.perf_counter() - began_s

    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
        probes = []
        for _ in range(PROBES):
            probes.append(tasks.create_task(probe(http)))
            await asyncio.sleep(PROBE_INTERVAL_S)
        await asyncio.wait(probes)
    return sorted(task.result() for task in probes)


def describe(sorted_s: list[float]) -> str:
    """Return the median and the 99th percentile in milliseconds."""
    median_s, p99_s = sorted_s[len(sorted_s) // 2], sorted_s[int(0.99 * len(sorted_s))]
    return f"TTFT p50 {1000 * median_s:.1f} ms, p99 {1000 * p99_s:.1f} ms"


__all__ = ["KEY", "LIMITED_KEY", "EdgeRouter", "describe", "measure_ttft_s", "open_edge_router"]
