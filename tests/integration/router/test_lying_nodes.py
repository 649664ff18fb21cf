"""A node that lies harms neither a key's quotas nor other requests: about what a request used, who
has it, or how another node fares."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from isochrone.wire.http import headers
from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.peers.routes import KeyLimits
from router.apis import translating_writer
from router.dataplane import generated_text
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.decide.choice.deployment_routing import BYTES_PER_TOKEN_MAX
from router.decide.liveness.outlier_ejection import FAILURES_MAX
from router.decide.replicas.latency import OVERHEAD_MS_MAX
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table
from tests.integration.router.test_serving import the_stream, until_idle, words
from tests.system.harness import until

CONTEXT_TOKENS = 4096
"""That of the deployment in `fleet_of`."""


class LyingNode(FakeNode):
    """Reports `prompt` and `output` tokens, whatever it has generated."""

    prompt = output = 2**52

    def _usage(self, count: int) -> dict[str, Any]:
        details = {"cached_tokens": 2**52}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.output}
        return {**counts, "total_tokens": 7, "prompt_tokens_details": details}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    limits = KeyLimits(tokens_per_min=1_000_000, tokens_per_day=5_000_000)
    async with a_bench(tmp_path, [LyingNode()], limits=limits, usage_interval_s=60.0) as bench:
        yield bench


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answer_does_not_use_up_a_quota(bench: Bench, stream: bool) -> None:
    for _ in range(3):
        async with bench.chat(stream=stream, max_tokens=2) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
    rows = bench.app.recorder._usage
    assert [(row.prompt_tokens, row.output_tokens) for row in rows[-1:]] == [(CONTEXT_TOKENS,) * 2]


async def test_prompts_are_not_estimated_by_a_lie(bench: Bench) -> None:
    node = bench.nodes[0]
    assert isinstance(node, LyingNode)
    node.prompt = 1
    async with bench.chat("x" * 100_000, max_tokens=2) as answer:
        assert answer.status == 200
    estimate = bench.app.fleet.routing(DeploymentId("d-1")).estimate_tokens(100_000)
    assert estimate >= 100_000 / BYTES_PER_TOKEN_MAX


class FloodingNode(FakeNode):
    """Begins each answer with a megabyte of spaces, and does not end it."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer without an end."""
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b" " * 2**20)
        self.sent += 1
        await self.note()
        await asyncio.Event().wait()
        return response


async def test_the_answers_of_one_node_take_half_of_the_memory_for_answers(tmp_path: Path) -> None:
    node = FloodingNode()
    async with a_bench(tmp_path, [node], answers_held_bytes_max=8 * 2**20) as bench:
        upstream = bench.app.upstream
        request = NodeRequest("POST", "/v1/chat/completions", "", b"{}")
        exchanges = [
            upstream.send(NodeId(node.name), node.address, request, 20.0, 2**26) for _ in range(10)
        ]

        async def six_are_refused() -> bool:
            return sum(one.is_over for one in exchanges) == 6

        await until("six answers are refused", six_are_refused)
        for one in exchanges:
            if one.is_over:
                with pytest.raises(AttemptFailed, match="than all its answers may take"):
                    one.response_head()
        assert upstream.answers.total <= 4 * 2**20
        for one in exchanges:
            one.abandon()
        assert upstream.answers.total == 0


@pytest.mark.parametrize(
    ("path", "asked", "error"),
    [
        ("responses", {"input": "x", "store": False}, "event: response.failed"),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, "event: error"),
    ],
)
async def test_no_stream_without_end_is_kept_for_its_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], error: str
) -> None:
    limit = 10_000
    for module in (translating_writer, generated_text):
        monkeypatch.setattr(module, "TEXT_CHARS_MAX", limit)
    node = FakeNode()
    node.filler, node.tokens = "x" * 999, 1000
    key = "max_output_tokens" if path == "responses" else "max_tokens"
    async with a_bench(tmp_path, [node], attempts_max=1) as bench:
        body = {"model": "tiny", key: node.tokens, "stream": True, **asked}
        async with bench.http.post(f"{bench.url}/v1/{path}", json=body) as answer:
            text = await answer.text()
        assert error in text and limit // 2 <= text.count("x" * 999) * 1000 < 3 * limit
        assert node.cancelled == 1 or node.sent < node.tokens
        # A complete answer has a limit of its own.
        whole = {**body, "stream": False, key: 20}
        async with bench.http.post(f"{bench.url}/v1/{path}", json=whole) as answer:
            assert answer.status == 200, await answer.text()


LONG = "word " * 200
"""Long enough that the router names peer replicas."""


def prefer(bench: Bench, tokens_per_s: float) -> None:
    """Let the first node be the fastest by far, and the others have this rate."""
    first, *rest = bench.nodes
    slow = [a_route(node, prefill_tokens_per_s=tokens_per_s) for node in rest]
    fast = a_route(first, prefill_tokens_per_s=10_000.0)
    bench.app.fleet.adopt(a_table([fast, *slow], generation=2))


@pytest.mark.parametrize("cut_at", [0, 3])
async def test_a_node_whose_handoffs_fail_may_hand_off_no_more_and_then_fails_alone(
    tmp_path: Path, cut_at: int
) -> None:
    """Which of the two nodes failed is not known, so the peer is never ejected for it."""
    async with a_bench(tmp_path, 3) as bench:
        lying, _, third = bench.nodes
        fleet = bench.app.fleet
        prefer(bench, 10.0)
        lying.handed_off_to, lying.cut_at, third.resumes = "r-n2", cut_at, "greedy"
        for n in range(30):
            fields = {"temperature": 0, "max_tokens": 8}
            _, events = await the_stream(bench, content=f"{n} {LONG}", **fields)
            assert words(events).split() == [f"t{n}" for n in range(8)]
            if unhealthy := fleet.health.unhealthy():
                break
        assert unhealthy == {"r-n1"}
        assert fleet.handoff_health.unhealthy() == {"r-n1", "r-n2"}
        names = [{name.lower() for name in sent} for sent in lying.request_headers]
        named = [headers.PEER_REPLICAS in one for one in names]
        assert named[: FAILURES_MAX + 1] == [True] * FAILURES_MAX + [False]
        await until_idle(bench)


async def test_a_node_whose_handoffs_are_late_may_hand_off_no_more(tmp_path: Path) -> None:
    """Else it would get more requests than others, and lose nothing by its delays."""
    async with a_bench(tmp_path, 3, first_byte_timeout_s=60.0) as bench:
        late, fleet = bench.nodes[0], bench.app.fleet
        prefer(bench, 10.0)
        late.handed_off_to, late.ttft_s = "r-n2", 2 * OVERHEAD_MS_MAX / 1000

        async def a_late_stream(number: int) -> None:
            async with bench.chat(f"{number} {LONG}", stream=True, max_tokens=2) as answer:
                assert answer.status == 200
                await answer.read()

        await asyncio.gather(*[a_late_stream(number) for number in range(FAILURES_MAX)])
        await until_idle(bench)
        assert late.requests == FAILURES_MAX
        assert fleet.handoff_health.unhealthy() == {"r-n1", "r-n2"}
        assert not fleet.health.unhealthy()


async def test_a_peer_that_a_lie_names_answers_when_no_other_replica_is_left(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, 2) as bench:
        lying, honest = bench.nodes
        prefer(bench, 1000.0)
        lying.handed_off_to, lying.cut_at = "r-n2", 0
        async with bench.chat(LONG, stream=True) as answer:
            assert (answer.status, answer.headers["x-isochrone-node"]) == (200, honest.name)
        assert (lying.requests, honest.requests) == (1, 1)


BUSY = "p=0;d=9;r=9;w=9;u=900;o=900;e=90000;z=9000;c=0"


async def test_a_node_makes_no_other_seem_slow_or_busy(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 2) as bench:
        lying, _ = bench.nodes
        fleet = bench.app.fleet
        prefer(bench, 1000.0)
        lying.handed_off_to, lying.ttft_s, lying.load = "r-n2", 0.3, BUSY
        _, events = await the_stream(bench, content=LONG)
        assert words(events).split() == [f"t{n}" for n in range(8)]
        replicas, other = fleet.routing(DeploymentId("d-1")).replicas, ReplicaId("r-n2")
        learned = replicas.corrections[replicas.slots[other]]
        assert learned.overhead_ms <= 0 and learned.gain <= 1
        load = fleet.in_flight.load_of(other)
        others = load.others.estimate(fleet.clock())
        assert (others.prefill, others.decode, load.wake_ms) == (0, 0, 0)
        assert not replicas.corrections[replicas.slots[ReplicaId("r-n1")]].answers
        lying.ttft_s, lying.refuse = 0.0, "busy"
        async with bench.chat(f"another {LONG}", stream=True) as answer:
            assert (answer.status, answer.headers["x-isochrone-node"]) == (200, "n2")
        assert lying.requests == 2
        assert [set(known) for known in fleet.full._refusals.values()] == [{"r-n1"}]
