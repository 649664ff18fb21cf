"""A key that is limited to regions is served there and nowhere else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_key, a_route, a_table


@asynccontextmanager
async def a_bench_in_two_cities(
    folder: Path, regions: tuple[str, ...], countries: dict[str, str]
) -> AsyncIterator[Bench]:
    """Yield a router in Amsterdam with a node there and one in Singapore."""
    nodes = [FakeNode("near", pop="ams"), FakeNode("far", pop="sin")]
    async with a_bench(folder, nodes) as bench:
        table = a_table(
            [a_route(node) for node in nodes], generation=2, keys=[a_key(regions=regions)]
        )
        pops = tuple(
            msgspec.structs.replace(pop, country=countries.get(pop.pop, "XX")) for pop in table.pops
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, pops=pops))
        yield bench


@pytest.mark.parametrize("region", ["sin", "SG"])
async def test_another_city_is_used_only_if_the_key_may(tmp_path: Path, region: str) -> None:
    async with a_bench_in_two_cities(tmp_path, (region,), {"sin": "SG"}) as bench:
        for _ in range(4):
            async with bench.chat() as response:
                assert response.status == 200
                assert response.headers["x-isochrone-node"] == "far"
                assert response.headers["x-isochrone-regions"] == region
        assert not bench.nodes[0].bodies


async def test_a_full_region_does_not_spill(tmp_path: Path) -> None:
    async with a_bench_in_two_cities(tmp_path, ("sin",), {}) as bench:
        bench.nodes[1].refuse = "busy"
        async with bench.chat() as response:
            assert response.status == 429
        assert not bench.nodes[0].bodies


async def test_a_broken_stream_is_not_continued_outside(tmp_path: Path) -> None:
    async with a_bench_in_two_cities(tmp_path, ("sin",), {}) as bench:
        bench.nodes[1].cut_at, bench.nodes[0].resumes = 2, "greedy"
        async with bench.chat(stream=True, temperature=0) as response:
            text = await response.text()
        assert "cannot continue this answer" in text
        assert not bench.nodes[0].bodies


async def test_a_region_without_replicas_is_named(tmp_path: Path) -> None:
    async with a_bench_in_two_cities(tmp_path, ("iad",), {}) as bench, bench.chat() as response:
        assert response.status == 503
        message = (await response.json())["error"]["message"]
        assert "no replica is ready yet in the regions of this key (iad)" in message
