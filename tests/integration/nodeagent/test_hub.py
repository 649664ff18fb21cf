"""Fetching a gated model from a hub that requires a token and redirects to another host."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from isochrone.service.config import ConfigError, read_secret
from isochrone.service.network.http_server import serve_http
from nodeagent.host.artifacts.download import ArtifactError
from tests.integration.nodeagent.test_artifacts import a_store, artifact_of, fetched

TOKEN = "hf_SecretOfTheHub"
SIGNED = "Signature=LetsAnybodyIn"
FILE = {"m.gguf": b"weights"}


class Hub:
    """A hub on one port and its file store on another. It records the tokens that it receives."""

    def __init__(self) -> None:
        self.url = self.store_url = ""
        self.received: list[tuple[str, str | None]] = []
        self.store_refuses = False

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        """Redirect: first to another path of the hub, as for a renamed model, then to the store."""
        self.received.append((request.path, request.headers.get("authorization")))
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        if request.path.startswith("/old/"):
            raise web.HTTPTemporaryRedirect(request.path.replace("/old/", "/new/", 1))
        raise web.HTTPFound(f"{self.store_url}/bytes?{SIGNED}")

    async def give(self, request: web.Request) -> web.StreamResponse:
        """Send the file if the URL is signed."""
        self.received.append((request.path, request.headers.get("authorization")))
        if self.store_refuses or request.query_string != SIGNED:
            raise web.HTTPForbidden
        return web.Response(body=FILE["m.gguf"])

    async def send_here(self, _: web.Request) -> web.StreamResponse:
        """Redirect to the hub, as a source that wants the token to be sent there."""
        raise web.HTTPFound(f"{self.url}/new/m/resolve/main/m.gguf")


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    served = Hub()
    async with AsyncExitStack() as stack:
        store, front = web.Application(), web.Application()
        store.router.add_get("/bytes", served.give)
        store.router.add_get("/elsewhere/{path:.*}", served.send_here)
        front.router.add_get("/{path:.*}", served.resolve)
        # Two ports of one machine: a token must not be sent to another port either.
        port = await stack.enter_async_context(serve_http(store, "127.0.0.1", 0))
        served.store_url = f"http://127.0.0.1:{port}"
        port = await stack.enter_async_context(serve_http(front, "127.0.0.1", 0))
        served.url = f"http://127.0.0.1:{port}"
        yield served


async def test_the_token_is_sent_to_the_hub_and_not_to_redirect_targets(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = a_store(tmp_path, hf=hub.url, hf_token=TOKEN)
    folder = await fetched(store, artifact_of("hf:old/m@v1", FILE))
    assert (folder / "m.gguf").read_bytes() == FILE["m.gguf"]
    assert hub.received == [
        ("/old/m/resolve/v1/m.gguf", f"Bearer {TOKEN}"),
        ("/new/m/resolve/v1/m.gguf", f"Bearer {TOKEN}"),
        ("/bytes", None),
    ]
    assert TOKEN not in caplog.text


async def test_the_token_is_not_sent_for_a_source_that_is_not_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    store = a_store(tmp_path, hf=hub.url, hf_token=TOKEN)
    with pytest.raises(ArtifactError, match=r"it answered 401$"):
        await fetched(store, artifact_of(f"{hub.store_url}/elsewhere", FILE))
    assert hub.received == [("/new/m/resolve/main/m.gguf", None)]


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "gated or private, or does not exist; .* set this node's hf_token_file"),
        ("hf_AnothersToken", "the token in hf_token_file is invalid or its account has no access"),
    ],
)
async def test_a_refused_gated_model_gives_advice(
    hub: Hub, tmp_path: Path, token: str, words: str
) -> None:
    store = a_store(tmp_path, hf=hub.url, hf_token=token)
    with pytest.raises(ArtifactError, match=f"answered 401: .*{words}") as refused:
        await fetched(store, artifact_of("hf:new/m", FILE))
    assert not token or token not in str(refused.value)


async def test_an_error_message_omits_the_signature_of_a_url(hub: Hub, tmp_path: Path) -> None:
    hub.store_refuses = True
    store = a_store(tmp_path, hf=hub.url, hf_token=TOKEN)
    with pytest.raises(ArtifactError, match=rf"cannot fetch {hub.store_url}/bytes: .* 403$"):
        await fetched(store, artifact_of("hf:new/m", FILE))


def test_a_secret_file_has_one_line_and_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "hf.token"
    with pytest.raises(ConfigError, match=r"cannot read the hub's token .*No such file"):
        read_secret(path, "the hub's token")
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="needs mode 0600"):
        read_secret(path, "the hub's token")
    path.chmod(0o600)
    assert read_secret(path, "the hub's token") == TOKEN
    for text in ("", "two\nlines"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="one line of at least 1 ASCII"):
            read_secret(path, "the hub's token")
