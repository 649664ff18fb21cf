"""The OpenAPI document of the public API: valid, complete, and true of drawn requests."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openapi_spec_validator import validate

from isochrone.wire.ids import DeploymentId, Generation
from ops.fuzz.openapi import command, environment
from router.apis.dispatch import INFERENCE_PATHS
from router.apis.document.routes import ROUTES
from router.apis.workers_ai.auxiliary import AUXILIARY_PATHS
from tests.integration.admin.conftest import TOKEN, Admin, admin
from tests.integration.router.fleet_of import KEY, a_route
from tests.integration.router.test_batches import BatchBench, bench

__all__ = ["admin", "bench"]

EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "3"))
SEED = int(os.environ.get("OPENAPI_SEED", "1"))
PHASES = os.environ.get("OPENAPI_PHASES", "fuzzing")
KINDS = {
    **{"tiny": "chat", "vectors": "embedding", "ranks": "rerank", "classes": "classify"},
    **{"sounds": "transcription", "voices": "speech", "images": "image"},
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {"batch_folder": tmp_path / "batches"}


@pytest.fixture
def url(bench: BatchBench) -> str:
    """Return the URL of a router with a scheduler, and a deployment of each kind."""
    directory = bench.app.fleet.directory
    table = directory.table
    assert table is not None
    deployments = tuple(
        msgspec.structs.replace(
            table.deployments[0],
            deployment_id=DeploymentId(f"d-{number}"),
            name=name,
            kind=kind,
            labels=("ok", "hate", "violence") if kind == "classify" else (),
        )
        for number, (name, kind) in enumerate(KINDS.items(), 1)
    )
    routes = tuple(
        msgspec.structs.replace(
            a_route(bench.node, f"r-{number}"), deployment_id=entry.deployment_id
        )
        for number, entry in enumerate(deployments, 1)
    )
    changed = msgspec.structs.replace(
        table, generation=Generation(2_000), deployments=deployments, routes=routes
    )
    bench.app.fleet.adopt(changed)
    assert directory.deployment("classes") is not None
    return f"http://127.0.0.1:{bench.app.port}"


async def test_the_document_is_valid_and_names_every_route(url: str) -> None:
    async with aiohttp.request("GET", f"{url}/openapi.json") as answer:
        assert answer.status == 200
        document: Any = await answer.json()
    validate(document)
    assert INFERENCE_PATHS | set(AUXILIARY_PATHS) <= document["paths"].keys()
    named = {(method, path) for path, item in document["paths"].items() for method in item}
    assert {(route.method.lower(), route.path) for route in ROUTES} <= named
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "kv_transfer_params" not in chat
    assert "messages" in chat
    for path, item in document["paths"].items():
        for name in re.findall(r"\{(\w+)\}", path):
            for operation in (item[method] for method in item if method != "servers"):
                assert name in {parameter["name"] for parameter in operation["parameters"]}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("api", ["public", "admin"])
async def test_drawn_requests_get_what_the_document_says(
    url: str, admin: Admin, tmp_path: Path, api: str
) -> None:
    pytest.importorskip("schemathesis", reason="install the development dependencies")
    at, token = (url, KEY) if api == "public" else (admin.url, TOKEN)
    process = await asyncio.create_subprocess_exec(
        *command(at, token, examples=EXAMPLES, seed=SEED, report=tmp_path / "report"),
        *("--phases", PHASES),
        env=environment("tiny"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode(errors="replace")[-20_000:]


FORM = "multipart/form-data; boundary=b"


def a_form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"


@pytest.mark.parametrize("path", ["/v1/files", "/ai/tomarkdown"])
async def test_a_form_with_a_malformed_header_is_refused(
    bench: BatchBench, url: str, path: str, tmp_path: Path
) -> None:
    body = a_form(
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello',
        b'Content-Disposition: form-data; name="\x00"\r\n\r\n1',
    )
    headers = {"authorization": f"Bearer {KEY}", "content-type": FORM}
    async with aiohttp.request("POST", f"{url}{path}", data=body, headers=headers) as answer:
        assert answer.status == 400, await answer.text()
    assert [file async for file in bench.client.files.list()] == []
    assert not list((tmp_path / "batches").iterdir()), "no bytes of a refused file are kept"


async def test_a_refused_form_leaves_no_file(url: str, tmp_path: Path) -> None:
    part = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello'
    headers = {"authorization": f"Bearer {KEY}", "content-type": FORM}
    for body in (a_form(part, part), a_form(part)):
        async with aiohttp.request("POST", f"{url}/v1/files", data=body, headers=headers) as answer:
            assert answer.status == 400
        assert not list((tmp_path / "batches").iterdir())


async def test_a_limit_with_leading_zeros_is_no_way_around_it(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for path in (
        "/v1/batches?limit=000000001000000",
        "/ai/finetunes/public?offset=0000000009999999999999999999",
    ):
        async with aiohttp.request("GET", f"{url}{path}", headers=headers) as answer:
            assert answer.status == 400, (path, await answer.text())
