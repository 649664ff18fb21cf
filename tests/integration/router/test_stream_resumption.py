"""A stream whose replica fails continues on another one, with no token lost or repeated."""

import asyncio
import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from isochrone.wire.http import headers
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import RolloutEntry
from isochrone.wire.peers.usage import RequestOutcome
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table
from tests.integration.router.test_serving import frames, usage, words

TOKENS = 12
TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def read_stream(bench: Bench, **fields: Any) -> str:
    """Stream a chat to its end; return the raw text of its events."""
    async with bench.chat(stream=True, max_tokens=TOKENS, **fields) as response:
        assert response.status == 200
        return str(await response.text())


def two_nodes(fault: str, at: int) -> list[FakeNode]:
    nodes = [FakeNode("bad"), FakeNode("good")]
    for node in nodes:
        node.resumes = headers.SEEDED
    setattr(nodes[0], f"{fault}_at", at)
    return nodes


def prefer_first_node(bench: Bench, **fields: Any) -> None:
    """Make the second node so slow that it is chosen only if the first is excluded."""
    bad, good = bench.nodes
    routes = [a_route(bad), a_route(good, prefill_tokens_per_s=1.0, **fields)]
    bench.app.fleet.adopt(a_table(routes, generation=2))


@pytest.mark.parametrize("fault", ["cut", "error"])
async def test_a_failure_at_any_token_leaves_the_client_one_stream(
    tmp_path: Path, fault: str
) -> None:
    nodes = two_nodes(fault, 0)
    async with a_bench(tmp_path, nodes, usage_interval_s=3600) as bench:
        prefer_first_node(bench)
        for at in range(1, TOKENS):
            setattr(nodes[0], f"{fault}_at", at)
            bench.app.fleet.health.remove_replicas({a_route(nodes[0]).replica_id})
            text = await read_stream(bench, temperature=0, stream_options={"include_usage": True})
            events = frames(text)
            assert words(events) == "".join(f"t{n} " for n in range(TOKENS)), f"killed at {at}"
            assert events[-1] == "[DONE]"
            assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
            counted = events[-2]["usage"]
            assert counted["completion_tokens"] == TOKENS
            assert ": continued" not in text
            resume_body = json.loads(nodes[1].bodies[-1])
            if fault == "cut" or "continue_final_message" in resume_body:
                assert resume_body["max_tokens"] == TOKENS - at
                assert resume_body["continue_final_message"] is True
            else:
                # The error came before any token was relayed: the other node starts anew.
                assert (resume_body["max_tokens"], at) == (TOKENS, 1)
        rows = await usage(bench)
        assert {(row.outcome, row.output_tokens) for row in rows} == {
            (RequestOutcome.COMPLETE, TOKENS)
        }
        assert len(rows) == TOKENS - 1


USAGE_FIRST = [b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 0}}\n\n']
NO_TOKENS = [b": nothing yet " + b"x" * 1000 + b"\n\n"] * 300


@pytest.mark.parametrize("preface", [USAGE_FIRST, NO_TOKENS], ids=["usage first", "300 kB held"])
async def test_a_stream_that_began_without_a_token_is_finished_by_another_replica(
    tmp_path: Path, preface: list[bytes]
) -> None:
    nodes = two_nodes("cut", 0)
    nodes[0].preface = preface
    async with a_bench(tmp_path, nodes, usage_interval_s=3600) as bench:
        prefer_first_node(bench)
        async with asyncio.timeout(30):
            events = frames(await read_stream(bench, temperature=0))
        assert words(events) == "".join(f"t{n} " for n in range(TOKENS))
        assert events[-1] == "[DONE]"
        assert headers.GENERATED_TOKENS not in nodes[1].request_headers[-1]
        (row,) = await usage(bench)
        assert (row.outcome, row.output_tokens) == (RequestOutcome.COMPLETE, TOKENS)


async def test_a_stream_continues_when_its_node_falls_silent(tmp_path: Path) -> None:
    async with a_bench(tmp_path, two_nodes("hang", 5), stream_idle_timeout_s=0.3) as bench:
        prefer_first_node(bench)
        assert words(frames(await read_stream(bench, seed=7))) == "".join(
            f"t{n} " for n in range(TOKENS)
        )
        assert bench.nodes[1].request_headers[-1][headers.GENERATED_TOKENS] == "5"


@pytest.mark.parametrize("needs_prefill", [False, True])
async def test_a_continuation_names_prefill_replicas_only_to_engines_that_cannot_read(
    tmp_path: Path, needs_prefill: bool
) -> None:
    nodes = [*two_nodes("cut", 5), FakeNode("reader")]
    async with a_bench(tmp_path, nodes) as bench:
        slow: dict[str, Any] = {"role": Role.DECODE, "prefill_tokens_per_s": 1.0}
        routes = [
            a_route(nodes[0], role=Role.DECODE),
            a_route(nodes[1], **slow),
            a_route(nodes[2], role=Role.PREFILL),
        ]
        table = a_table(routes, generation=2)
        entry = replace(table.deployments[0], needs_prefill=needs_prefill)
        bench.app.fleet.adopt(replace(table, deployments=(entry,)))
        events = frames(await read_stream(bench, seed=7))
        assert words(events) == "".join(f"t{n} " for n in range(TOKENS))
        sent = nodes[1].request_headers[-1]
        assert sent[headers.GENERATED_TOKENS] == "5"
        assert (headers.PREFILL_REPLICAS in sent) == needs_prefill


async def test_a_sampled_text_is_marked_as_continued(tmp_path: Path) -> None:
    async with a_bench(tmp_path, two_nodes("cut", 5)) as bench:
        prefer_first_node(bench)
        assert "\n: continued on another replica" in await read_stream(bench, temperature=1)


async def test_a_completion_is_resumed_by_extending_its_prompt(tmp_path: Path) -> None:
    async with a_bench(tmp_path, two_nodes("cut", 5)) as bench:
        prefer_first_node(bench)
        body = {"model": "tiny", "prompt": "count:", "stream": True, "max_tokens": TOKENS}
        async with bench.http.post(f"{bench.url}/v1/completions", json=body) as response:
            assert words(frames(await response.text())).split() == [f"t{n}" for n in range(TOKENS)]
        assert json.loads(bench.nodes[1].bodies[-1])["prompt"] == "count:t0 t1 t2 t3 t4 "


@pytest.mark.parametrize(
    ("tools", "replacement", "seen"),
    [(TOOLS, 200, (1, 1)), (None, 500, (2, 2)), (None, 200, (2, 1))],
    ids=["not resumed", "resumed in vain", "resumed"],
)
async def test_each_attempt_of_a_stream_is_counted_once(
    tmp_path: Path, tools: list[Any] | None, replacement: int, seen: tuple[int, int]
) -> None:
    nodes = two_nodes("cut", 5)
    nodes[1].status, nodes[1].ttft_s = replacement, 0.2
    async with a_bench(tmp_path, nodes, demand_interval_s=3600, attempts_max=1) as bench:
        routes = [a_route(nodes[0]), a_route(nodes[1], prefill_tokens_per_s=500.0)]
        table = a_table(routes, generation=2)
        entry = replace(table.deployments[0], rollout=RolloutEntry(version=2, share=1.0))
        bench.app.fleet.adopt(replace(table, deployments=(entry,)))
        await read_stream(bench, **({} if tools is None else {"tools": tools}))
        (trial,) = bench.app.recorder.trials.take()
        assert (trial.attempts, trial.failures) == seen
        if seen == (2, 1):
            # The second attempt is measured from when it was sent, against its own prediction.
            assert exp(trial.ttft.total / trial.ttft.count) > 150
            assert exp(trial.itl.total / trial.itl.count) < 20
            errors = "isochrone_router_ttft_prediction_error_seconds_bucket"
            labels = {"deployment": "tiny", "le": "0.1"}
            assert bench.app.metrics.registry.get_sample_value(errors, labels) == 0


async def test_a_stream_survives_a_second_failure(tmp_path: Path) -> None:
    nodes = two_nodes("cut", 3)
    third = FakeNode("third")
    third.resumes = headers.SEEDED
    nodes[1].cut_at = 7
    async with a_bench(tmp_path, [*nodes, third]) as bench:
        rates = (5000.0, 100.0, 1.0)
        routes = [
            a_route(n, prefill_tokens_per_s=r) for n, r in zip(bench.nodes, rates, strict=True)
        ]
        bench.app.fleet.adopt(a_table(routes, generation=2))
        assert words(frames(await read_stream(bench))).split() == [f"t{n}" for n in range(TOKENS)]
        assert [node.requests for node in bench.nodes] == [1, 1, 1]


@pytest.mark.parametrize(
    "fields",
    [{"tools": TOOLS}, {"response_format": {"type": "json_object"}}, {"n": 2}, {"logprobs": True}],
    ids=["tools", "json", "n", "logprobs"],
)
async def test_a_request_with_state_besides_its_text_is_not_resumed(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with a_bench(tmp_path, two_nodes("cut", 5)) as bench:
        prefer_first_node(bench)
        events = frames(await read_stream(bench, **fields))
        assert events[-1]["error"]["code"] == "upstream_error"
        assert bench.nodes[1].requests == 0


class HalfAnsweringNode(FakeNode):
    """A node that fails after the first of two answers is complete."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream the first answer, then abort."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta, finish in (({"content": "t0 "}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response


@pytest.mark.parametrize(("count", "is_complete"), [(1, True), (2, False)])
async def test_one_complete_answer_of_two_does_not_complete_the_stream(
    tmp_path: Path, count: int, is_complete: bool
) -> None:
    async with a_bench(tmp_path, [HalfAnsweringNode("bad"), FakeNode("good")]) as bench:
        prefer_first_node(bench)
        events = frames(await read_stream(bench, n=count))
        assert (events[-1] == "[DONE]") == is_complete
        assert ("error" in events[-1]) != is_complete


@pytest.mark.parametrize(
    ("path", "prompt", "kind"),
    [
        ("chat/completions", {"messages": [{"role": "user"}]}, "chat.completion.chunk"),
        ("completions", {"prompt": "hi"}, "text_completion"),
    ],
    ids=["chat", "completion"],
)
async def test_the_end_that_a_replica_did_not_send_is_of_the_streams_kind(
    tmp_path: Path, path: str, prompt: dict[str, Any], kind: str
) -> None:
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **prompt}
    async with a_bench(tmp_path, [HalfAnsweringNode("bad")]) as bench:
        async with bench.http.post(f"{bench.url}/v1/{path}", json=body) as response:
            *_, end, done = frames(await response.text())
        assert (end["object"], end["usage"]["completion_tokens"], done) == (kind, 1, "[DONE]")


class SpentNode(FakeNode):
    """A node that fails after the last token that the answer may have."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream all tokens, then abort."""
        body = await request.json()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for n in range(body["max_tokens"]):
            text = f"t{n} "
            output: Any = {"delta": {"content": text}} if "messages" in body else {"text": text}
            choice = {"index": 0, **output, "finish_reason": None}
            event = {"id": "c-1", "created": 7, "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages"])
async def test_an_answer_of_all_its_tokens_is_ended_without_another_replica(
    tmp_path: Path, path: str
) -> None:
    nodes = [SpentNode("bad"), FakeNode("good")]
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path == "completions":
        prompt = {"prompt": "hi"}
    if path != "messages":
        prompt["stream_options"] = {"include_usage": True}
    body = {"model": "tiny", "stream": True, "max_tokens": 3, **prompt}
    async with a_bench(tmp_path, nodes, usage_interval_s=3600) as bench:
        prefer_first_node(bench)
        async with bench.http.post(f"{bench.url}/v1/{path}", json=body) as response:
            text = await response.text()
        assert nodes[1].requests == 0 and "t2 " in text
        (row,) = await usage(bench)
        assert (row.outcome, row.output_tokens) == (RequestOutcome.COMPLETE, 3)
        if path == "messages":
            assert '"stop_reason":"max_tokens"' in text and "message_stop" in text
            return
        *_, finish, counted, done = frames(text)
        assert finish["choices"][0]["finish_reason"] == "length"
        assert (finish["id"], finish["created"], done) == ("c-1", 7, "[DONE]")
        assert counted["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("resumes", "is_exact"), [("inexact", False), ("greedy", True)])
async def test_a_greedy_answer_of_an_inexact_engine_is_marked(
    tmp_path: Path, resumes: str, is_exact: bool
) -> None:
    nodes = two_nodes("cut", 5)
    nodes[1].resumes = resumes
    async with a_bench(tmp_path, nodes) as bench:
        prefer_first_node(bench)
        text = await read_stream(bench, temperature=0)
        assert words(frames(text)[:-1]) == "".join(f"t{n} " for n in range(TOKENS))
        assert (": continued" in text) is not is_exact


async def test_a_node_that_would_begin_anew_is_not_used(tmp_path: Path) -> None:
    nodes = two_nodes("cut", 5)
    nodes[1].resumes = ""
    async with a_bench(tmp_path, nodes) as bench:
        prefer_first_node(bench)
        events = frames(await read_stream(bench, temperature=0))
        assert words(events[:-1]) == "t0 t1 t2 t3 t4 "
        assert "error" in events[-1]


async def test_a_stream_waits_for_full_replicas_if_the_free_ones_cannot_resume_it(
    tmp_path: Path,
) -> None:
    nodes = [*two_nodes("cut", 5), FakeNode("cannot")]
    async with a_bench(tmp_path, nodes) as bench:
        rates = (100.0, 1.0, 10.0)
        routes = [a_route(n, prefill_tokens_per_s=r) for n, r in zip(nodes, rates, strict=True)]
        bench.app.fleet.adopt(a_table(routes, generation=2))
        fleet, group = bench.app.fleet, ("acme", False)
        fleet.full.record_refusal(group, routes[1].replica_id, 0, fleet.clock())
        events = frames(await read_stream(bench, temperature=0))
        assert words(events[:-1]) == "".join(f"t{n} " for n in range(TOKENS))
        assert nodes[2].requests == 1


async def test_the_prompt_of_a_resumption_is_that_of_the_first_attempt(tmp_path: Path) -> None:
    nodes = two_nodes("cut", 2)
    nodes[0].prompt_tokens, nodes[1].prompt_tokens = 50, 52
    nodes[1].itl_s = 0.02
    async with a_bench(tmp_path, nodes, usage_interval_s=3600) as bench:
        prefer_first_node(bench)
        async with bench.chat(stream=True, max_tokens=1000, temperature=0) as response:
            await response.content.readuntil(b"t4")
        await nodes[1].until(lambda: nodes[1].cancelled == 1)
        (row,) = await usage(bench)
        assert (row.prompt_tokens, row.output_tokens >= 4) == (50, True)


async def test_a_client_that_disconnects_during_a_resumption_frees_everything(
    tmp_path: Path,
) -> None:
    nodes = two_nodes("cut", 2)
    nodes[1].ttft_s = 30
    async with a_bench(tmp_path, nodes, usage_interval_s=3600) as bench:
        prefer_first_node(bench)
        async with bench.chat(stream=True, max_tokens=TOKENS) as response:
            await response.content.readuntil(b"t1")
            await nodes[1].until(lambda: nodes[1].running == 1)
        await nodes[1].until(lambda: nodes[1].cancelled == 1)
        (row,) = await usage(bench)
        assert (row.outcome, row.output_tokens) == (RequestOutcome.CANCELLED, 2)
