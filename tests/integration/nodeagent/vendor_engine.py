"""A program in place of vLLM, SGLang or TensorRT-LLM that runs one leg of a request.

It takes the real command line and the real fields, as strictly as those engines do (those of SGLang
and TensorRT-LLM are in tests/engines/vendor_fields.json), and moves "KV" (a digest of the prompt)
over a port of its own, so that a decode leg without a prefill leg before it shows. The answer to a
prompt is the same wherever the prompt was read.

FAULTS names a file with this replica's fault: prefill_500, prefill_hang, prefill_dies,
prefill_garbage, decode_500, no_kv, slow.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ARGUMENTS = sys.argv[1:]
KIND = next(kind for kind in ("vllm", "sglang", "tensorrt_llm") if kind in ARGUMENTS[0])
REPLICA = os.environ["REPLICA"]
FETCH_S = 10.0
SLOW_S = 0.5


def flag(name: str, default: str = "") -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1] if name in ARGUMENTS else default


CONFIG = json.loads(flag("--kv-transfer-config", "{}"))
MODE = flag("--disaggregation-mode")
KEY = flag("--api-key")
kv: dict[str, str] = {}
fetched: dict[str, asyncio.Event] = {}
seen: set[str] = set()
tokens = {"local_compute": 0, "external_kv_transfer": 0}
running = 0
slowed = 0


class Wrong(Exception):
    """The request has fields that the engine would not take."""


def fault() -> str:
    return str(json.loads(Path(os.environ["FAULTS"]).read_text()).get(REPLICA, ""))


def check(holds: object, message: str) -> None:
    if not holds:
        raise Wrong(message)


async def fetch(url: str, digest: str) -> bool:
    """Fetch KV from another engine, as often as it takes; say whether it is of this prompt."""
    if fault() == "no_kv":
        return False
    try:
        async with asyncio.timeout(FETCH_S), aiohttp.ClientSession() as http:
            while True:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return await answer.text() == digest
                await asyncio.sleep(0.01)
    except (aiohttp.ClientError, TimeoutError):
        return False


async def serve_kv(request: web.Request) -> web.Response:
    """Give the KV of a transfer to whoever asks for it, once."""
    name = request.match_info["name"]
    if name not in kv:
        return web.Response(status=404)
    fetched.setdefault(name, asyncio.Event()).set()
    return web.Response(text=kv.pop(name))


async def vllm_legs(body: dict[str, Any], digest: str, extra: dict[str, Any]) -> str:
    params = body.get("kv_transfer_params")
    if not params:
        return "local_compute"
    check(CONFIG and CONFIG["kv_role"] == "kv_both", "no connector")
    is_nixl = CONFIG["kv_connector"] == "NixlConnector"
    host, port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", ""), PORT
    if params["do_remote_decode"]:
        check(body["max_tokens"] == 1 and not body["stream"], "a prefill leg generates one token")
        check("stream_options" not in body, "stream_options without stream")
        name = digest if is_nixl else params["transfer_id"]
        kv[name] = digest
        if is_nixl and fault() != "prefill_garbage":
            place = {"remote_host": host, "remote_port": port, "remote_request_id": name}
            extra["kv_transfer_params"] = {
                **{"do_remote_prefill": True, "do_remote_decode": False},
                **{"remote_block_ids": [[1, 2]], "remote_engine_id": CONFIG["engine_id"], **place},
            }
        return "local_compute"
    if is_nixl:
        base = f"http://{params['remote_host']}:{params['remote_port']}"
        url = f"{base}/kv/{params['remote_request_id']}"
    else:
        base = params["remote_bootstrap_addr"]
        async with aiohttp.ClientSession() as http, http.get(f"{base}/query") as answer:
            check(await answer.text() == params["remote_engine_id"], "another engine")
        url = f"{base}/kv/{params['transfer_id']}"
    # kv_load_failure_policy: recompute
    check(CONFIG["kv_load_failure_policy"] == "recompute", "a failed load would be an error")
    return "external_kv_transfer" if await fetch(url, digest) else "local_compute"


async def sglang_legs(body: dict[str, Any], digest: str, extra: dict[str, Any]) -> str:
    if not MODE:
        return "local_compute"
    room = body.get("bootstrap_room")
    check(room is not None, "Disaggregated request received without bootstrap room id")
    host = body["bootstrap_host"]
    if host == "2.2.2.2":
        return "local_compute"
    name = str(room)
    if MODE == "prefill":
        check(int(body["bootstrap_port"]) == PORT, "the room is at another server")
        kv[name] = digest
        # It answers once the decode engine has the KV: one leg after the other would hang.
        async with asyncio.timeout(FETCH_S):
            await fetched.setdefault(name, asyncio.Event()).wait()
        return "local_compute"
    url = f"http://{host}:{body['bootstrap_port']}/kv/{name}"
    check(await fetch(url, digest), "KVTransferError: no KV came")
    return "external_kv_transfer"


async def tensorrt_legs(body: dict[str, Any], digest: str, extra: dict[str, Any]) -> str:
    params = body.get("disaggregated_params")
    if params is None:
        return "local_compute"
    config = Path(flag("--extra_llm_api_options")).read_text()
    check("cache_transceiver_config:\n  backend: " in config, "no cache transceiver")
    if params["request_type"] == "context_only":
        check("disable_overlap_scheduler: true" in config, "overlap scheduler")
        check(not body.get("stream"), "a context phase streams nothing")
        kv[digest] = digest
        state = f"http://127.0.0.1:{PORT}/kv/{digest}"
        if fault() != "prefill_garbage":
            extra["disaggregated_params"] = {**params, "encoded_opaque_state": state}
            extra["finish_reason"] = "length"
            extra["prompt_token_ids"] = prompt_of(body)
        return "local_compute"
    check(params["request_type"] == "generation_only", "unknown request type")
    check(await fetch(params["encoded_opaque_state"], digest), "no KV came")
    return "external_kv_transfer"


def check_leg(kind: str, body: dict[str, Any]) -> None:
    """Raise Wrong for fields that the vendor's server does not take."""
    from tests.engines.vendor_request import Refusal, check_fields

    try:
        # A router's request always has a model.
        params = check_fields(kind, {"model": "m", **body}).get("disaggregated_params")
        if params is not None:
            check_fields("disaggregated_params", params)
    except Refusal as error:
        raise Wrong(str(error)) from error


LEGS = {"vllm": vllm_legs, "sglang": sglang_legs, "tensorrt_llm": tensorrt_legs}


def prompt_of(body: dict[str, Any]) -> list[int]:
    if "prompt_token_ids" in body:
        return list(body["prompt_token_ids"])
    if "prompt" in body:
        return list(body["prompt"])
    return [len(word) for message in body["messages"] for word in message["content"].split()]


async def counted_answer(request: web.Request) -> web.StreamResponse:
    global running
    running += 1
    try:
        return await answer(request)
    finally:
        running -= 1


async def answer(request: web.Request) -> web.StreamResponse:
    global slowed
    if KEY and request.headers.get("authorization") != f"Bearer {KEY}":
        return web.Response(status=401)
    body = await request.json()
    is_split = (
        any(
            name in body
            for name in ("kv_transfer_params", "bootstrap_room", "disaggregated_params")
        )
        and body.get("bootstrap_host") != "2.2.2.2"
    )
    wrong = fault() if is_split else ""
    if wrong == "prefill_dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "prefill_hang":
        await asyncio.Event().wait()
    if wrong == "slow":
        slowed += 1
        await asyncio.sleep(SLOW_S)
    if wrong in ("prefill_500", "decode_500"):
        return web.json_response({"error": {"message": wrong}}, status=500)
    prompt = prompt_of(body)
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
    cached = len(prompt) - 1 if digest in seen else 0
    extra: dict[str, Any] = {}
    try:
        if KIND != "vllm":
            check_leg("chat" if "chat" in request.path else "completion", body)
        source = await LEGS[KIND](body, digest, extra)
    except Wrong as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    seen.add(digest)
    tokens[source] += len(prompt)
    count = body.get("max_tokens") or 8
    if KIND == "sglang" and MODE == "prefill":
        count = 1
    words = [f"{digest}-{number} " for number in range(count)]
    usage: dict[str, Any] = {
        **{"prompt_tokens": len(prompt), "completion_tokens": count},
        "total_tokens": len(prompt) + count,
        "prompt_tokens_details": {
            "cached_tokens": len(prompt) if source == "external_kv_transfer" else cached
        },
    }
    if not body.get("stream"):
        choice: dict[str, Any] = {"index": 0, "text": "".join(words), "finish_reason": "length"}
        for name in ("disaggregated_params", "finish_reason"):
            if name in extra:
                choice[name] = extra.pop(name)
        return web.json_response({"choices": [choice], "usage": usage, **extra})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for word in words:
        frame = {"choices": [{"index": 0, "text": word}]}
        await response.write(f"data: {json.dumps(frame, separators=(',', ':'))}\n\n".encode())
    last = {"choices": [], "usage": usage}
    await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
    return response


async def page(request: web.Request) -> web.Response:
    lines = [f'prompt_tokens_by_source{{source="{name}"}} {n}' for name, n in tokens.items()]
    return web.Response(text="\n".join([*lines, f"running {running}", f"slowed {slowed}"]))


async def query(request: web.Request) -> web.Response:
    return web.Response(text=CONFIG["engine_id"])


PORT = int(
    os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
    or os.environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT")
    or flag("--disaggregation-bootstrap-port")
    or flag("--port")
)


async def main() -> None:
    app, transfers = web.Application(), web.Application()
    app.router.add_get("/health", page)
    app.router.add_get("/metrics", page)
    app.router.add_get("/prometheus/metrics", page)
    app.router.add_post("/v1/completions", counted_answer)
    app.router.add_post("/v1/chat/completions", counted_answer)
    own = app if int(flag("--port")) == PORT else transfers
    own.router.add_get("/kv/{name}", serve_kv)
    own.router.add_get("/query", query)
    for served, port in ((app, int(flag("--port"))), (transfers, PORT)):
        if served is app or own is transfers:
            # As vLLM does, it ends a request whose client has left.
            runner = web.AppRunner(served, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


asyncio.run(main())
