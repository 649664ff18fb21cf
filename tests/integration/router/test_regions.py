"""A key that is limited to regions is served there and nowhere else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.ids import Generation
from tests.integration.admin.conftest import admin
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import Bench, a_bench, a_key, a_route, a_table
from tests.integration.router.test_batches import (
    BatchBench,
    a_line,
    adapters_used,
    adopt_adapters,
    bench,
)
from tests.integration.router.test_stored_responses import ended

__all__ = ["admin", "bench"]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {"batch_folder": tmp_path / "batches"}


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
            assert response.headers["x-isochrone-regions"] == "sin"
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
        assert response.headers["x-isochrone-regions"] == "iad"
        message = (await response.json())["error"]["message"]
        assert "no replica is ready yet in the regions of this key (iad); others are" in message
        assert "ask the operator to keep one there (`keep_warm`)" in message


async def test_a_retry_stays_inside(tmp_path: Path) -> None:
    async with a_bench_in_two_cities(tmp_path, ("sin",), {}) as bench:
        bench.nodes[1].status = 503
        async with bench.chat() as response:
            assert response.status == 502
        assert len(bench.nodes[1].bodies) > 1
        assert not bench.nodes[0].bodies


async def test_documents_are_converted_inside(tmp_path: Path) -> None:
    async with a_bench_in_two_cities(tmp_path, ("SG",), {"sin": "SG"}) as bench:
        form = aiohttp.FormData()
        form.add_field("files", b"<p>text</p>", filename="page.html")
        url = f"{bench.url}/client/v4/accounts/acme/ai/tomarkdown"
        async with bench.http.post(url, data=form) as response:
            answer = await response.json()
        assert (response.status, answer["errors"][0]["code"]) == (403, 3041)
        assert "limited to SG; connect to an endpoint there" in answer["errors"][0]["message"]


async def test_batches_adapters_and_background_responses_stay_inside(bench: BatchBench) -> None:
    adopt_adapters(bench)
    table = bench.app.fleet.directory.table
    assert table is not None
    async with open_node(FakeNode("far", pop="sin")) as far:
        bench.app.fleet.adopt(
            msgspec.structs.replace(
                table,
                generation=Generation(table.generation + 1),
                routes=tuple(sorted([a_route(far), *table.routes], key=lambda r: r.replica_id)),
                keys=KeyTable.of([a_key(regions=("sin",))]),
            )
        )
        batch = await bench.run(a_line("plain"), a_line("adapted", model="tiny:mine"))
        assert batch.request_counts.completed == 2
        assert adapters_used(far) == ["", "ft-1"]
        queued = await bench.client.responses.create(model="tiny", input="one", background=True)
        assert (await ended(bench, queued.id)).status == "completed"
        await bench.client.responses.create(
            model="tiny", input="two", previous_response_id=queued.id
        )
        assert far.requests == 4
    assert not bench.node.bodies
