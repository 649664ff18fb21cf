"""Routes that are relayed to the scheduler: unknown ones are refused by the router."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.routes import KeyEntry
from router.apis import relay
from router.apis.batches import queued_runs
from router.apis.document.routes import ROUTES
from router.apis.relay import check_route
from router.apis.responses.stored_routes import is_stored_path
from router.apis.workers_ai import finetunes
from router.config import RouterConfig
from router.dataplane.http_messages import HttpRequest
from router.dataplane.upload_spool import UploadSpool

STORED = [
    (route.method, route.path.replace("{", "").replace("}", ""))
    for route in ROUTES
    if route.path.startswith(("/v1/files", "/v1/batches"))
    or (is_stored_path(route.path.replace("{", "").replace("}", "")) and not route.is_inference)
]


@pytest.mark.parametrize(("method", "path"), STORED)
def test_every_documented_route_is_relayed(method: str, path: str) -> None:
    check_route(method, path, path)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/files", "GET, POST"),
        ("POST", "/v1/responses/r", "GET, DELETE"),
        ("GET", "/v1/batches/b/cancel", "POST"),
        ("DELETE", "/v1/conversations", "POST"),
    ],
)
def test_other_methods_are_refused_with_those_that_exist(
    method: str, path: str, allow: str
) -> None:
    with pytest.raises(ApiError) as refused:
        check_route(method, path, f"/ai{path}")
    assert refused.value.code is ErrorCode.METHOD_NOT_ALLOWED
    assert refused.value.headers == {"allow": allow}
    assert f"/ai{path}" in refused.value.message


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v1/files/f/parts", "there is no such path"),
        ("POST", "/v1/responses/compact", "not compacted here"),
    ],
)
def test_other_paths_are_not_found(method: str, path: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        check_route(method, path, path)
    assert refused.value.code is ErrorCode.NOT_FOUND


class StoringClient:
    """Stands for the client of schedulers: notes how large a file each request has it store."""

    def __init__(self) -> None:
        self.stored_bytes: list[int] = []

    @asynccontextmanager
    async def relay(self, *_: Any, stored_bytes: int = 0, **__: Any) -> AsyncIterator[Any]:
        self.stored_bytes.append(stored_bytes)

        async def read() -> bytes:
            return b"{}"

        yield SimpleNamespace(status=200, content_length=2, read=read)


async def answer_queued(client: Any, request: HttpRequest, writer: Any) -> None:
    queued = queued_runs.QueuedRequests(requests=[{}])
    await queued_runs._answer(client, request, queued, "m", writer)


ASSETS: Final = "/ai/finetunes/a/finetune-assets"
STORING: Final[dict[str, Callable[[Any, HttpRequest, Any], Awaitable[None]]]] = {
    "/v1/files": relay._relay,
    ASSETS: lambda client, *rest: finetunes._relay(client, ASSETS, *rest),
    "/ai/queued": answer_queued,
}


@pytest.mark.parametrize("path", STORING)
async def test_a_request_that_stores_a_file_says_how_large_it_is(path: str, tmp_path: Path) -> None:
    """The scheduler has time by that to answer."""
    client, writer = StoringClient(), SimpleNamespace(reply=lambda _: None)
    client_of: Any = SimpleNamespace(relay=client.relay, require_batches=lambda: None)
    request = HttpRequest()
    request.method, request.path = b"POST", path
    request.key = KeyEntry(key_id=KeyId("k"), secret_sha256="0" * 64, tenant_id=TenantId("a"))
    request.upload = UploadSpool(tmp_path, RouterConfig(state_folder=tmp_path)).open(request)
    if request.upload is not None:
        request.upload.write(bytes(1000))
    await STORING[path](client_of, request, writer)
    [size] = client.stored_bytes
    if request.upload is None:
        assert size > 50, "the line of a batch"
    else:
        assert size == 1000
        request.upload.close()


@pytest.mark.parametrize("name", ["..", ".", ".a", "-", "a/..", "%2e%2e", ""])
def test_no_name_of_an_adapter_leads_to_another_route_of_the_scheduler(name: str) -> None:
    """A client of the scheduler resolves `..` before it sends the path."""
    assert finetunes.finetune_path(f"/ai/finetunes/{name}") == ""
    assert finetunes.finetune_path(f"/ai/finetunes/{name}/finetune-assets") == ""


@pytest.mark.parametrize("name", ["ft-0123456789abcdef01234567", "a", "a..b", "public"])
def test_an_adapter_has_a_path_by_its_id_and_name(name: str) -> None:
    path = f"/ai/finetunes/{name}/finetune-assets"
    assert finetunes.finetune_path(f"/client/v4/accounts/acme{path}") == path
