"""Streams at an engine's pace, whose tokens are relayed in C: whatever ends them, none is lost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.http import headers
from isochrone.wire.peers.usage import RequestOutcome
from router.dataplane import token_pump
from tests.c_module import compile_now
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench
from tests.integration.router.test_serving import frames, usage, words
from tests.integration.router.test_stream_resumption import prefer_first_node

SOURCE = Path(__file__).parents[3] / "router" / "dataplane" / "stream_pump.c"
TOKENS = 16
WHOLE = "".join(f"t{n} " for n in range(TOKENS))


@pytest.fixture(autouse=True, scope="module")
def pump_in_c(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Relay in C, in either build."""
    module = compile_now(SOURCE, tmp_path_factory.mktemp("c"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_pump, "new_pump", module.StreamPump)
        yield


class PacedStream:
    """One client's stream. `pumped` is the most streams that were relayed in C at a time."""

    def __init__(self) -> None:
        self.text = ""
        self.pumped = 0

    async def read(self, bench: Bench, until: str = "", **fields: Any) -> None:
        """Read the stream of a chat to its end, or leave when its text has `until`."""
        async with bench.chat(stream=True, max_tokens=TOKENS, **fields) as response:
            assert response.status == 200
            async for piece in response.content.iter_any():
                self.text += piece.decode()
                self.pumped = max(self.pumped, len(bench.app.upstream.pump))
                if until and until in self.text:
                    return


def two_nodes(**faults: int) -> list[FakeNode]:
    nodes = [FakeNode("bad"), FakeNode("good")]
    for node in nodes:
        node.resumes, node.itl_s = headers.SEEDED, 0.004
    for name, at in faults.items():
        setattr(nodes[0], name, at)
    return nodes


@pytest.mark.parametrize("fault", ["cut_at", "error_at", "hang_at"])
@pytest.mark.parametrize("at", [3, 9, 15])
async def test_another_replica_continues_at_the_very_token(
    tmp_path: Path, fault: str, at: int
) -> None:
    nodes, stream = two_nodes(**{fault: at}), PacedStream()
    async with a_bench(tmp_path, nodes, usage_interval_s=3600, stream_idle_timeout_s=0.3) as bench:
        prefer_first_node(bench)
        await stream.read(bench, temperature=0, stream_options={"include_usage": True})
        events = frames(stream.text)
        assert words(events) == WHOLE and events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == TOKENS
        assert nodes[1].request_headers[-1][headers.GENERATED_TOKENS] == str(at)
        (row,) = await usage(bench)
        assert (row.outcome, row.output_tokens) == (RequestOutcome.COMPLETE, TOKENS)
        assert stream.pumped == 1 and len(bench.app.upstream.pump) == 0


async def test_the_tokens_of_a_client_that_leaves_are_counted(tmp_path: Path) -> None:
    (node, _), stream = two_nodes(), PacedStream()
    async with a_bench(tmp_path, [node], usage_interval_s=3600) as bench:
        await stream.read(bench, until="t9 ")
        await node.until(lambda: node.cancelled == 1)
        (row,) = await usage(bench)
        assert row.outcome is RequestOutcome.CANCELLED
        assert 10 <= row.output_tokens < TOKENS
        assert stream.pumped == 1 and len(bench.app.upstream.pump) == 0


async def test_a_router_that_drains_lets_its_streams_end(tmp_path: Path) -> None:
    (node, _), stream = two_nodes(), PacedStream()
    async with a_bench(tmp_path, [node]) as bench:
        reading = asyncio.create_task(stream.read(bench))
        await node.until(lambda: node.running == 1)
        async with asyncio.timeout(30):
            while not stream.pumped:
                await asyncio.sleep(0)
            bench.app.server.is_draining = True
            await reading
        assert words(frames(stream.text)) == WHOLE


async def test_many_streams_at_once_are_each_their_own(tmp_path: Path) -> None:
    (node, _), streams = two_nodes(), [PacedStream() for _ in range(40)]
    async with a_bench(tmp_path, [node], usage_interval_s=3600) as bench:
        await asyncio.gather(*(stream.read(bench) for stream in streams))
        assert [words(frames(stream.text)) for stream in streams] == [WHOLE] * len(streams)
        rows = await usage(bench)
        assert {row.output_tokens for row in rows} == {TOKENS} and len(rows) == len(streams)
        assert max(stream.pumped for stream in streams) > 1
        # All connections are of use again.
        await PacedStream().read(bench)
        assert len(bench.app.upstream) <= len(streams) + 1
