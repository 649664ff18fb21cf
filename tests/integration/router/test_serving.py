"""Requests through the router to nodes that answer, refuse, break or fall silent."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from multidict import CIMultiDict

from isochrone.wire.http.headers import parse_peer_replicas
from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import KeyLimits, RolloutEntry
from isochrone.wire.peers.usage import RequestOutcome, UsageRow
from router.decide.liveness.outlier_ejection import FAILURES_MAX
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_key, a_route, a_table
from tests.system.harness import until


def frames(text: str) -> list[Any]:
    """Return a stream's frames, decoded except `[DONE]`."""
    data = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in data]


def words(events: list[Any]) -> str:
    """Return the text of a stream's frames."""
    deltas = [
        event["choices"][0]["delta"]
        for event in events
        if isinstance(event, dict) and event.get("choices")
    ]
    return "".join(delta.get("content") or "" for delta in deltas)


async def the_stream(bench: Bench, **fields: Any) -> tuple[dict[str, str], list[Any]]:
    async with bench.chat(stream=True, **fields) as response:
        assert response.status == 200, await response.text()
        return dict(response.headers), frames(await response.text())


async def until_idle(bench: Bench) -> None:
    """Wait until no request is in flight."""
    async with asyncio.timeout(30):
        while bench.app.fleet.in_flight.requests:
            await bench.app.loops["gauges"].wait_turns(1)


async def usage(bench: Bench) -> list[UsageRow]:
    """Return the usage of the requests so far; only with a long `usage_interval_s`."""
    await until_idle(bench)
    return list(bench.app.recorder.take_usage()[0])


async def test_a_response_names_its_node_and_the_reason(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        async with bench.chat(headers={"x-request-id": "abc-1"}, max_tokens=3) as response:
            body = await response.json()
        assert body["choices"][0]["message"]["content"] == "t0 t1 t2"
        assert response.headers["x-request-id"] == "abc-1"
        assert response.headers["x-isochrone-pop"] == "ams"
        assert response.headers["x-isochrone-node"] == "n1"
        assert response.headers["x-isochrone-why"].startswith("nearest-warm rtt=")
        async with bench.chat(headers={"x-request-id": "no\tgood"}) as response:
            assert response.headers["x-request-id"].startswith("req-")


async def test_requests_with_the_same_client_id_are_counted_separately(
    tmp_path: Path,
) -> None:
    same_id = {"x-request-id": "abc-1"}
    async with a_bench(tmp_path, usage_interval_s=3600) as bench:
        for _ in range(3):
            async with bench.chat(headers=same_id, max_tokens=3) as response:
                assert response.headers["x-request-id"] == "abc-1"
        rows = await usage(bench)
        # The store counts each id once, and engines identify requests by it.
        ids = [row.request_id for row in rows]
        assert len(set(ids)) == 3
        assert all(request_id.startswith("abc-1-") for request_id in ids)
        assert [CIMultiDict(seen)["x-request-id"] for seen in bench.nodes[0].request_headers] == ids


async def test_a_complete_answer_leaves_no_predicted_queue(tmp_path: Path) -> None:
    # By the table's rate this prompt takes seconds; the node answers at once.
    async with a_bench(tmp_path, route={"prefill_tokens_per_s": 10.0}) as bench:
        for _ in range(5):
            async with bench.chat("word " * 20, max_tokens=1) as response:
                assert response.status == 200
                assert " queue=0ms " in response.headers["x-isochrone-why"]


async def test_the_node_gets_the_clients_own_bytes(tmp_path: Path) -> None:
    raw = b'{ "model":"tiny", "x": 1.50, "messages":[{"role":"user","content":"h\\u00e9"}] }'
    async with a_bench(tmp_path) as bench:
        path = f"{bench.url}/v1/chat/completions"
        async with bench.http.post(path, data=raw) as response:
            assert response.status == 200
        streamed = raw.replace(b'"x"', b'"stream":true,"x"')
        async with bench.http.post(path, data=streamed) as response:
            text = await response.text()
        assert bench.nodes[0].bodies[0] == raw
        added = b'{"stream_options":{"include_usage":true}, '
        assert bench.nodes[0].bodies[1] == added + streamed[2:]
        assert '"usage"' not in text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_large_prompt_reaches_the_node_whole(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 3_000_000}]}
        raw = io.BytesIO(json.dumps(body).encode())
        async with bench.http.post(f"{bench.url}/v1/chat/completions", data=raw) as response:
            assert response.status == 200
        assert bench.nodes[0].bodies == [raw.getvalue()]


async def test_cached_tokens_are_always_reported(tmp_path: Path) -> None:
    node = FakeNode()
    node.cached_tokens = None
    async with a_bench(tmp_path, [node]) as bench:
        async with bench.chat() as response:
            details = (await response.json())["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 0}
        _, events = await the_stream(bench, stream_options={"include_usage": True})
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("fault", ["status", "refuse", "gone", "cut", "garbage", "silent", "error"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_before_the_first_token_another_replica_is_tried(
    tmp_path: Path, fault: str, stream: bool
) -> None:
    bad, good = FakeNode("bad"), FakeNode("good")
    async with a_bench(tmp_path, [bad, good], first_byte_timeout_s=0.4) as bench:
        routes = [a_route(bad), a_route(good, prefill_tokens_per_s=1.0)]
        if fault == "gone":
            bad.port = 9
            routes[0] = a_route(bad)
        bad.status = 503 if fault == "status" else 200
        bad.refuse = "busy" if fault == "refuse" else ""
        bad.cut_at = 0 if fault == "cut" else None
        bad.error_at = 0 if fault == "error" else None
        bad.garbage = bad.plain_garbage = fault == "garbage"
        bad.hang_at = 0 if fault == "silent" else None
        bad.ttft_s = 30 if fault == "silent" else 0
        bench.app.fleet.adopt(a_table(routes, generation=2))
        async with bench.chat(stream=stream) as response:
            text = await response.text()
            assert response.status == 200, text
            expected = "good" if stream or fault not in ("cut", "error") else "bad"
            assert response.headers["x-isochrone-node"] == expected
        if stream:
            assert words(frames(text)) == "t0 t1 t2 t3 t4 t5 t6 t7 "
        await until_idle(bench)


@pytest.mark.parametrize("fault", ["cut", "hang", "error"])
async def test_a_break_after_the_first_token_is_reported_in_the_stream(
    tmp_path: Path, fault: str
) -> None:
    node = FakeNode()
    setattr(node, f"{fault}_at", 3)
    async with a_bench(tmp_path, [node], usage_interval_s=3600) as bench:
        await bench.app.loops["usage"].wait_turns(0)
        _, events = await the_stream(bench)
        assert words(events[:-1]) == "t0 t1 t2 "
        assert "error" in events[-1]
        assert "[DONE]" not in events
        (row,) = await usage(bench)
        assert (row.outcome, row.output_tokens) == (RequestOutcome.FAILED, 3)
        # The router also tried to resume on the broken node, which cannot.
        assert node.requests == 2


async def test_a_client_that_disconnects_frees_the_node_at_once(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with a_bench(tmp_path, [node], usage_interval_s=3600) as bench:
        async with bench.chat(stream=True, max_tokens=10_000) as response:
            await response.content.readuntil(b"t2")
        await node.until(lambda: node.cancelled == 1)
        (row,) = await usage(bench)
        assert row.outcome is RequestOutcome.CANCELLED
        assert 2 <= row.output_tokens < 100


@pytest.mark.parametrize(("said", "counted"), [(777, 777), (10**8, 4096)])
async def test_a_prompt_is_counted_by_the_engine_though_its_client_disconnects(
    tmp_path: Path, said: int, counted: int
) -> None:
    """No prompt is longer than the context."""
    node = FakeNode()
    node.itl_s, node.prompt_tokens = 0.02, said
    async with a_bench(tmp_path, [node], usage_interval_s=3600) as bench:
        async with bench.chat(stream=True, max_tokens=10_000) as response:
            await response.content.readuntil(b"t2")
        await node.until(lambda: node.cancelled == 1)
        (row,) = await usage(bench)
        assert row.prompt_tokens == counted


async def test_a_client_that_disconnects_during_prefill_frees_the_node(tmp_path: Path) -> None:
    node = FakeNode()
    node.ttft_s = 30
    async with a_bench(tmp_path, [node], first_byte_timeout_s=30) as bench:
        request = asyncio.create_task(bench.chat().__aenter__())
        await node.until(lambda: node.running == 1)
        request.cancel()
        await node.until(lambda: node.cancelled == 1)
        await until_idle(bench)


async def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    node = FakeNode()
    async with a_bench(tmp_path, [node], write_timeout_s=0.3) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.app.port, limit=1024)
        body = json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "max_tokens": 1_000_000,
            }
        ).encode()
        key = bench.http.headers["authorization"].encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: " + key)
        writer.write(b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await node.until(lambda: node.cancelled == 1, 30)
        await until_idle(bench)
        writer.transport.abort()
        del reader


async def test_a_session_stays_on_its_replica_until_that_is_gone(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 4) as bench:
        nodes_by_session: dict[str, set[str]] = {}
        for _ in range(3):
            for n in range(12):
                headers = {"x-session-affinity": f"s-{n}"}
                async with bench.chat(headers=headers) as response:
                    nodes_by_session.setdefault(f"s-{n}", set()).add(
                        response.headers["x-isochrone-node"]
                    )
        # A stall of the machine makes a replica seem slow, and its sessions may leave it.
        stayed = {session: one for session, (one, *more) in nodes_by_session.items() if not more}
        assert len(stayed) >= 8, nodes_by_session
        assert len(set(stayed.values())) >= 2
        gone = next(iter(stayed.values()))
        left = [a_route(node) for node in bench.nodes if node.name != gone]
        bench.app.fleet.adopt(a_table(left, generation=2))
        has_moved = 0
        for session, before in stayed.items():
            async with bench.chat(headers={"x-session-affinity": session}) as response:
                now = response.headers["x-isochrone-node"]
            assert now != gone
            has_moved += now != before != gone
        assert has_moved <= len(stayed) // 3


async def test_the_next_replica_serves_when_the_nearest_is_full_and_then_429(
    tmp_path: Path,
) -> None:
    near, far = FakeNode("near"), FakeNode("far", "iad")
    near.itl_s = far.itl_s = 0.05
    route = {"tokens_in_flight_max": 1200}
    async with a_bench(tmp_path, [near, far], route=route) as bench:
        async with bench.chat(stream=True, max_tokens=1000) as first:
            await first.content.readuntil(b"t0")
            assert first.headers["x-isochrone-node"] == "near"
            async with bench.chat(stream=True, max_tokens=1000) as second:
                await second.content.readuntil(b"t0")
                assert second.headers["x-isochrone-node"] == "far"
                for options in ({"rejectIfBusy": True}, {}):
                    async with bench.chat(max_tokens=1000, options=options) as third:
                        error = (await third.json())["error"]
                        assert third.status == 429
                        assert error["code"] == "out_of_capacity"
                        assert error["message"].startswith("3040")
                        assert int(third.headers["retry-after"]) >= 1
        await until_idle(bench)
        (row,) = bench.app.recorder.take_demand() or [None]
        assert row is None or row.refused <= 2


async def test_a_request_that_is_not_to_wait_passes_over_full_batches(tmp_path: Path) -> None:
    nodes = [FakeNode("near"), FakeNode("far", "iad")]
    async with a_bench(tmp_path, nodes, probe_interval_s=0.05) as bench:
        loads = bench.app.fleet.in_flight

        async def report(*running: int) -> None:
            for node, number in zip(nodes, running, strict=True):
                node.loads = f"r-{node.name} p=0;d=0;r={number};w=0;u=0;o=0;e=0;s=2"

            async def are_known() -> bool:
                known = [loads.load_of(ReplicaId(f"r-{node.name}")) for node in nodes]
                return [load.others_requests for load in known] == list(running) and all(
                    load.sequences_max == 2 for load in known
                )

            await until("the pings are answered", are_known)

        async def served_by(**fields: Any) -> str:
            async with bench.chat(max_tokens=2, **fields) as response:
                if response.status != 200:
                    assert (await response.json())["error"]["message"].startswith("3040")
                return str(response.headers.get("x-isochrone-node", response.status))

        busy = {"options": {"rejectIfBusy": True}}
        await report(1, 2)
        assert await served_by(**busy) == "near"
        await report(2, 1)
        assert await served_by(**busy) == "far"
        await report(2, 3)
        assert (await served_by(**busy), await served_by() != "429") == ("429", True)


async def test_a_request_goes_where_a_sequence_is_free_sooner(tmp_path: Path) -> None:
    nodes = [FakeNode("near"), FakeNode("far", "iad")]
    nodes[1].ping_s = 0.1
    async with a_bench(tmp_path, nodes, probe_interval_s=0.05) as bench:
        for running, served_by in ((1, "near"), (3, "far")):
            nodes[0].loads = f"r-near p=0;d=0;r={running};w=0;u=0;o=0;e=0;s=2;t=30000"

            async def is_known(running: int = running) -> bool:
                load = bench.app.fleet.in_flight.load_of(ReplicaId("r-near"))
                return load.others_requests == running

            await until("the ping is answered", is_known)
            async with bench.chat(max_tokens=2) as response:
                assert response.headers["x-isochrone-node"] == served_by


async def test_waiting_requests_are_served_as_soon_as_there_is_capacity(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with a_bench(
        tmp_path, [node], route={"tokens_in_flight_max": 60}, queue_timeout_s=10
    ) as bench:

        async def send() -> int:
            async with bench.chat(max_tokens=30) as response:
                await response.read()
                return int(response.status)

        node.ttft_s = 0.05
        assert await asyncio.gather(*(send() for _ in range(6))) == [200] * 6
        assert node.running_max == 1


async def test_refusals_of_all_nodes_give_429_and_not_502(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 2) as bench:
        for node in bench.nodes:
            node.refuse = "busy"
        async with bench.chat() as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "out_of_capacity"


async def test_requests_that_wait_do_not_ask_a_full_node_without_end(tmp_path: Path) -> None:
    node, count = FakeNode(), 24
    node.requests_max, node.ttft_s = 4, 0.2
    async with a_bench(tmp_path, [node], queue_timeout_s=30) as bench:

        async def send() -> int:
            async with bench.chat() as response:
                return int(response.status)

        assert await asyncio.gather(*(send() for _ in range(count))) == [200] * count
    # All ask once, before any is refused. Then one asks for each answer, and a few a second anyway.
    assert node.requests < 3 * count


async def test_a_deployment_without_replicas_gives_503_and_is_counted(tmp_path: Path) -> None:
    async with a_bench(tmp_path, demand_interval_s=3600) as bench:
        bench.app.fleet.adopt(a_table([], generation=2))
        bench.app.recorder.on_unserved = lambda: None
        bench.app.recorder.take_demand()
        async with bench.chat() as response:
            assert response.status == 503
            assert "retry-after" in response.headers
        (row,) = bench.app.recorder.take_demand()
        assert (row.no_replica, row.refused, row.requests) == (1, 1, 1)


async def test_the_first_request_without_a_replica_sends_demand_at_once(tmp_path: Path) -> None:
    async with a_bench(tmp_path, demand_interval_s=3600, queue_timeout_s=0.1) as bench:
        bench.app.fleet.adopt(a_table([], generation=2))
        demand = bench.app.loops["demand"]
        sent = asyncio.create_task(demand.wait_turns(1))
        async with bench.chat() as response:
            assert response.status == 503
        async with asyncio.timeout(20):
            await sent
        turns = demand.turns
        # The planner knows now: later requests are sent with the window's demand.
        async with bench.chat() as response:
            assert response.status == 503
        await bench.app.loops["gauges"].wait_turns(2)
        assert demand.turns == turns


async def test_a_request_that_waits_for_the_first_replica_is_counted_once_while_it_waits(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, demand_interval_s=3600, queue_timeout_s=30) as bench:
        recorder = bench.app.recorder
        recorder.on_unserved = lambda: None
        table = bench.app.fleet.directory.table
        assert table is not None
        bench.app.fleet.adopt(replace(table, routes=(), generation=Generation(2)))
        recorder.take_demand()
        stream = asyncio.create_task(the_stream(bench, max_tokens=3))
        async with asyncio.timeout(20):
            while not (counted := recorder.take_demand()):
                await bench.app.loops["gauges"].wait_turns(1)
        assert not stream.done()
        bench.app.fleet.adopt(replace(table, generation=Generation(3)))
        assert words((await stream)[1]).split() == ["t0", "t1", "t2"]
        await until_idle(bench)
        rows = (*counted, *recorder.take_demand())
        assert sum(row.requests for row in rows) == sum(row.no_replica for row in rows) == 1
        assert sum(row.prompt_tokens for row in rows) > 0
        assert sum(row.output_tokens for row in rows) > 0


async def test_attempts_are_limited_and_then_502(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 5) as bench:
        for node in bench.nodes:
            node.status = 500
        async with bench.chat() as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "upstream_error"
        assert sum(node.requests for node in bench.nodes) == 3


async def test_retries_are_limited_to_a_share_of_requests(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 2) as bench:
        for node in bench.nodes:
            node.status = 500
        for _ in range(60):
            async with bench.chat() as response:
                assert response.status == 502
        # 60 first attempts, a reserve of 10 retries, and a fifth of 60 more.
        assert sum(node.requests for node in bench.nodes) <= 60 + 10 + 12 + 1


async def test_a_nodes_400_goes_to_the_client_without_a_retry(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 2) as bench:
        for node in bench.nodes:
            node.status = 400
        async with bench.chat() as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"] == "broken"
        assert sum(node.requests for node in bench.nodes) == 1


async def test_a_400_is_not_counted_as_a_failure_or_as_demand(tmp_path: Path) -> None:
    async with a_bench(tmp_path, usage_interval_s=3600, demand_interval_s=3600) as bench:
        (node,) = bench.nodes
        table = a_table([a_route(node)], generation=2, keys=[a_key()])
        entry = replace(table.deployments[0], rollout=RolloutEntry(version=2, share=1.0))
        bench.app.fleet.adopt(replace(table, deployments=(entry,)))
        for node.status in (400, 200):
            async with bench.chat() as response:
                assert response.status == node.status
        rows = await usage(bench)
        (trial,), (demand,) = bench.app.recorder.trials.take(), bench.app.recorder.take_demand()
        assert (trial.attempts, trial.failures) == (1, 0)
        registry = bench.app.metrics.registry
        for outcome, count in (("declined", 1), ("complete", 1), ("failed", 0)):
            labels = {"deployment": "tiny", "outcome": outcome}
            name = "isochrone_router_requests_total"
            assert registry.get_sample_value(name, labels) == count
        assert [row.outcome for row in rows] == [RequestOutcome.REFUSED, RequestOutcome.COMPLETE]
        # The demand holds only the request that needed a replica.
        assert (demand.requests, demand.refused) == (1, 0)
        assert demand.prompt_tokens == rows[1].prompt_tokens


async def test_a_failed_attempt_counts_for_its_version_although_another_one_answers(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, 2) as bench:
        bad, good = bench.nodes
        bad.status = 500
        routes = [replace(a_route(bad), version=2), a_route(good)]
        table = a_table(routes, generation=2, keys=[a_key()])
        entry = replace(table.deployments[0], rollout=RolloutEntry(version=2, share=1.0))
        bench.app.fleet.adopt(replace(table, deployments=(entry,)))
        async with bench.chat() as response:
            assert response.status == 200
        trials = bench.app.recorder.trials.take()
        counts = {row.version: (row.attempts, row.failures) for row in trials}
        assert counts == {1: (1, 0), 2: (1, 1)}


async def test_a_keys_rate_limits_are_enforced(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_min=2, tokens_per_min=100_000)
    async with a_bench(tmp_path, limits=limits) as bench:
        async with bench.chat(max_tokens=5) as response:
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == "1"
            assert int(response.headers["x-ratelimit-remaining-tokens"]) < 100_000
        async with bench.chat(max_tokens=5) as response:
            assert response.status == 200
        async with bench.chat(max_tokens=5) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(response.headers["retry-after"]) <= 31
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            assert "x-should-retry" not in response.headers


async def test_an_exceeded_quota_differs_from_a_rate_limit_and_from_missing_capacity(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, limits=KeyLimits(tokens_per_day=10)) as bench:
        async with bench.chat(max_tokens=5) as response:
            assert response.status == 200
        async with bench.chat(max_tokens=5) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (
                429,
                "insufficient_quota",
                "insufficient_quota",
            )
            assert response.headers["x-should-retry"] == "false"
            assert 1 <= int(response.headers["retry-after"]) <= 86_400


async def test_a_keys_concurrency_limit_is_enforced_and_released(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with a_bench(tmp_path, [node], limits=KeyLimits(concurrency=1)) as bench:
        async with bench.chat(stream=True, max_tokens=1000) as stream:
            await stream.content.readuntil(b"t0")
            async with bench.chat() as response:
                assert response.status == 429
        await node.until(lambda: node.running == 0)
        await until_idle(bench)
        async with bench.chat() as response:
            assert response.status == 200


async def test_usage_is_recorded_once_per_request(tmp_path: Path) -> None:
    async with a_bench(tmp_path, usage_interval_s=3600) as bench:
        await the_stream(bench, max_tokens=4)
        async with bench.chat(max_tokens=5) as response:
            await response.read()
        rows = await usage(bench)
        counts = [(r.prompt_tokens, r.cached_tokens, r.output_tokens, r.outcome) for r in rows]
        assert counts == [(11, 3, 4, RequestOutcome.COMPLETE), (11, 3, 5, RequestOutcome.COMPLETE)]
        assert len({row.request_id for row in rows}) == 2


async def test_a_handed_off_request_is_recorded_at_the_peer(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3, usage_interval_s=600) as bench:
        target, peer, other = bench.nodes
        fleet, long = bench.app.fleet, "word " * 200
        slow = [a_route(node, prefill_tokens_per_s=1000.0) for node in (peer, other)]
        fast = a_route(target, prefill_tokens_per_s=10_000.0)
        fleet.adopt(a_table([fast, *slow], generation=2))
        target.handed_off_to, target.load = "r-n2", "p=0;d=90000;r=1;w=0;u=0"
        response_headers, events = await the_stream(
            bench, content=long, headers={"x-session-affinity": "s"}
        )
        assert response_headers["x-isochrone-node"] == "n2"
        assert words(events).split() == [f"t{n}" for n in range(8)]
        named = parse_peer_replicas(target.request_headers[0]["x-isochrone-peer-replicas"])
        assert [replica.replica_id for replica in named] == ["r-n1", "r-n2", "r-n3"]
        assert (peer.requests, other.requests) == (0, 0)
        binding = fleet.sessions.lookup("acme/s", fleet.clock())
        assert binding is not None and binding.replica_id == "r-n2"
        (row,) = await usage(bench)
        assert row.node_id == "n2"
        assert target.request_headers[0]["x-isochrone-router"] == fleet.name
        assert int(target.request_headers[0]["x-isochrone-prefill-ms"]) > 5
        # A node does not make a router believe that another one is busy.
        for name in ("r-n1", "r-n2"):
            assert fleet.in_flight.load_of(ReplicaId(name)).others.decode_tokens == 0
        # After a break within the answer another replica continues, and neither is ejected.
        target.cut_at, other.resumes, peer.refuse = 3, "greedy", "busy"
        for _ in range(FAILURES_MAX):
            _, events = await the_stream(bench, content=long, temperature=0, max_tokens=8)
            assert words(events).split() == [f"t{n}" for n in range(8)]
        assert not fleet.health.unhealthy()
        await until_idle(bench)


@pytest.mark.parametrize("takes_back", [False, True])
async def test_a_handoff_counts_at_the_peer_before_there_is_a_token(
    tmp_path: Path, takes_back: bool
) -> None:
    async with a_bench(tmp_path, 2, usage_interval_s=600) as bench:
        target, peer = bench.nodes
        fleet = bench.app.fleet
        slow = a_route(peer, prefill_tokens_per_s=1000.0)
        fleet.adopt(a_table([a_route(target, prefill_tokens_per_s=9000.0), slow], generation=2))
        target.handed_off_to, target.announces, target.takes_back = "r-n2", True, takes_back

        def requests() -> tuple[int, ...]:
            loads = [fleet.in_flight.load_of(ReplicaId(name)) for name in ("r-n1", "r-n2")]
            return tuple(load.requests for load in loads)

        stream = asyncio.create_task(the_stream(bench, content="word " * 300))
        async with asyncio.timeout(30):
            while requests() != (0, 1):
                await asyncio.sleep(0.005)
        assert fleet.in_flight.load_of(ReplicaId("r-n2")).prefill_tokens > 0
        target.may_answer.set()
        response_headers, events = await stream
        assert words(events).split() == [f"t{n}" for n in range(8)]
        assert response_headers["x-isochrone-node"] == ("n1" if takes_back else "n2")
        (row,) = await usage(bench)
        assert row.node_id == ("n1" if takes_back else "n2")
        await until_idle(bench)
        assert requests() == (0, 0)
        # The prompt is cached only where it was read.
        target.announces, target.handed_off_to, target.takes_back = False, "", False
        async with bench.chat("word " * 300) as response:
            assert response.headers["x-isochrone-node"] == ("n1" if takes_back else "n2")


async def test_a_prompt_counts_where_it_is_read(tmp_path: Path) -> None:
    """A prefill replica gets no requests, but the tokens of the prompts that it reads."""
    async with a_bench(tmp_path, 3, usage_interval_s=600) as bench:
        target, first, second = bench.nodes
        fleet = bench.app.fleet
        fleet.adopt(
            a_table(
                [
                    a_route(target, role=Role.DECODE, prefill_tokens_per_s=1000.0),
                    a_route(first, role=Role.PREFILL),
                    a_route(second, role=Role.PREFILL),
                ],
                generation=2,
            )
        )
        target.read_by = ["r-n2", "r-n3", "r-n1"]

        def prefill_tokens() -> list[int]:
            loads = [fleet.in_flight.load_of(a_route(node).replica_id) for node in bench.nodes]
            return [load.prefill_tokens for load in loads]

        stream = asyncio.create_task(the_stream(bench, content="word " * 300))
        for slot in (1, 2, 0):
            async with asyncio.timeout(30):
                while [tokens > 0 for tokens in prefill_tokens()] != [n == slot for n in range(3)]:
                    await asyncio.sleep(0.005)
            assert fleet.in_flight.load_of(ReplicaId("r-n1")).requests == 1
            target.may_answer.set()
        response_headers, events = await stream
        assert words(events).split() == [f"t{n}" for n in range(8)]
        assert "read-at" not in response_headers["x-isochrone-why"]
        named = parse_peer_replicas(target.request_headers[0]["x-isochrone-prefill-replicas"])
        assert named[0].replica_id == "r-n1"
        assert {replica.replica_id for replica in named[1:]} == {"r-n2", "r-n3"}
        assert named[1].prefill_ms < named[0].prefill_ms
        for reader in ("r-n2", "unknown"):
            target.read_by = [reader]
            target.may_answer.set()
            response_headers, _ = await the_stream(bench, content=f"{reader} " * 300)
            assert response_headers["x-isochrone-why"].endswith(f" read-at={reader}")
        assert not fleet.in_flight.load_of(ReplicaId("unknown")).requests
        # The one that has read the prompt comes first for the next that begins with it.
        for reader in ("r-n3", "r-n2"):
            target.read_by = [reader]
            target.may_answer.set()
            await the_stream(bench, content=f"of {reader} " * 300)
        target.read_by = ["r-n3"]
        target.may_answer.set()
        await the_stream(bench, content="of r-n3 " * 300 + "more " * 300)
        named = parse_peer_replicas(target.request_headers[-1]["x-isochrone-prefill-replicas"])
        assert [replica.replica_id for replica in named[1:]] == ["r-n3", "r-n2"]
        assert named[1].prefill_ms < 0.75 * named[2].prefill_ms
        await until_idle(bench)
        assert prefill_tokens() == [0, 0, 0]
        # From the first token on the prompt counts nowhere as one to be read.
        target.hang_at = 1
        target.may_answer.set()
        async with bench.chat("of r-n3 " * 300, stream=True, max_tokens=8) as response:
            assert b"role" in await response.content.readline()
            assert fleet.in_flight.load_of(ReplicaId("r-n1")).requests == 1
            assert prefill_tokens() == [0, 0, 0]
        await until_idle(bench)
        assert (first.requests, second.requests) == (0, 0)


async def test_a_clients_own_transfer_fields_do_not_reach_an_engine(tmp_path: Path) -> None:
    """They name hosts to pull KV from; also if a name is written with escapes."""
    async with a_bench(tmp_path) as bench:
        fields: dict[str, Any] = {
            "kv_transfer_params": {"remote_host": "evil"},
            "bootstrap_room": 7,
        }
        async with bench.chat(**fields, bootstrap_host="evil", disaggregated_params=None) as got:
            assert got.status == 200
        sent = json.loads(bench.nodes[0].bodies[0])
        assert set(sent) == {"model", "messages"} | (set(sent) & {"max_tokens", "stream"})
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
        escaped = body[:-1] + ', "kv_tr\\u0061nsfer_params": {"remote_host": "evil"}}'
        path, head = f"{bench.url}/v1/chat/completions", {"content-type": "application/json"}
        async with bench.http.post(path, data=escaped, headers=head) as got:
            assert got.status == 200
        assert b"evil" not in bench.nodes[0].bodies[1]
        # vLLM takes the fields from among these entries, too.
        nested = {"kv_transfer_params": "evil", "ec_transfer_params": ["evil"], "kept": 1}
        async with bench.chat(vllm_xargs=nested) as got:
            assert got.status == 200
        assert json.loads(bench.nodes[0].bodies[2])["vllm_xargs"] == {"kept": 1}
        # Other surfaces refuse the fields, or leave them out of what they translate.
        named: dict[str, Any] = dict.fromkeys(ENGINE_FIELDS, "evil")
        named["vllm_xargs"] = dict.fromkeys(ENGINE_FIELDS, "evil")
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        for surface, fields in (
            ("/v1/completions", {"model": "tiny", "prompt": "x"}),
            ("/v1/responses", {"model": "tiny", "input": "x"}),
            ("/v1/messages", {"model": "tiny", **chat}),
            ("/client/v4/accounts/a/ai/run/tiny", chat),
        ):
            count = len(bench.nodes[0].bodies)
            body = json.dumps({**fields, **named})
            async with bench.http.post(f"{bench.url}{surface}", data=body, headers=head) as got:
                assert got.status in (200, 400), (surface, await got.text())
            sent_bodies = bench.nodes[0].bodies[count:]
            assert len(sent_bodies) == (got.status == 200), surface
            assert not [one for one in sent_bodies if b"evil" in one], surface


async def test_a_failed_attempt_leaves_no_prefix_in_the_index(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, 2) as bench:
        broken, healthy = bench.nodes
        broken.cached_tokens = healthy.cached_tokens = 11
        fleet, long = bench.app.fleet, "word " * 400
        slow: dict[str, Any] = {"prefill_tokens_per_s": 20.0}
        fleet.adopt(a_table([a_route(broken), a_route(healthy, **slow)], generation=2))
        broken.status = 500
        async with bench.chat(long) as response:
            assert response.headers["x-isochrone-node"] == healthy.name
        assert (broken.requests, healthy.requests) == (1, 1)
        broken.status = 200
        fleet.adopt(a_table([a_route(broken, **slow), a_route(healthy, **slow)], generation=3))
        for _ in range(10):
            async with bench.chat(long) as response:
                assert response.headers["x-isochrone-why"].startswith("prefix ")
                assert response.headers["x-isochrone-node"] == healthy.name


async def test_a_declined_request_leaves_no_prefix_in_the_index(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, 2, route={"prefill_tokens_per_s": 20.0}) as bench:
        reasons = []
        for status in (400, 200, 200):
            for node in bench.nodes:
                node.status = status
            async with bench.chat("word " * 400) as response:
                assert response.status == status
                reasons.append(response.headers["x-isochrone-why"].split()[0])
        assert reasons == ["nearest-warm", "nearest-warm", "prefix"]


@pytest.mark.parametrize("unnamed", [["r-unknown", "r-unknown"], ["r-n2", "r-n1"]])
async def test_a_handoff_to_a_replica_that_was_not_named_is_a_failure_of_the_target(
    tmp_path: Path, unnamed: list[str]
) -> None:
    """The prompt is too short to be handed off, so none is named."""
    async with a_bench(tmp_path, 2) as bench:
        for node, name in zip(bench.nodes, unnamed, strict=True):
            node.handed_off_to = name
        for _ in range(2 * FAILURES_MAX):
            async with bench.chat() as response:
                assert response.status == 502
        assert bench.app.fleet.health.unhealthy() == {"r-n1", "r-n2"}
        await until_idle(bench)


async def test_the_node_gets_the_clients_priority_objective_and_trace(tmp_path: Path) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with a_bench(tmp_path) as bench:
        async with bench.chat(headers={"x-isochrone-priority": "7", "traceparent": trace}) as got:
            assert got.status == 200
        sent = {name.lower(): value for name, value in bench.nodes[0].request_headers[0].items()}
        assert (sent["x-isochrone-priority"], sent["traceparent"]) == ("7", trace)
        async with bench.chat(headers={"traceparent": "odd"}) as got:
            assert got.status == 200
        assert "traceparent" not in {name.lower() for name in bench.nodes[0].request_headers[1]}
        async with bench.chat(headers={"x-isochrone-ttft-ms": "90000"}) as got:
            assert got.status == 200
        assert 0 < int(bench.nodes[0].request_headers[2]["x-isochrone-ttft-ms"]) <= 90_000
        for objective in ("0", "-1", "soon", "600001"):
            async with bench.chat(headers={"x-isochrone-ttft-ms": objective}) as got:
                error = (await got.json())["error"]
                assert (got.status, error["param"]) == (400, "x-isochrone-ttft-ms")
        for priority in ("51", "-1", "x", "100"):
            async with bench.chat(headers={"x-isochrone-priority": priority}) as got:
                error = (await got.json())["error"]
                assert (got.status, error["param"]) == (400, "x-isochrone-priority")
