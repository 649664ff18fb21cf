"""The adapters that an engine has loaded: what a request that is given up leaves of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.models.model import Artifact
from isochrone.wire.peers.adapter import RequestAdapter
from nodeagent.drivers.driver import LOAD_ADAPTER_PATH
from nodeagent.host.engines.engine_adapters import AdapterUnavailable, EngineAdapters


class SlowEngine:
    """An engine that forgets an adapter once it may."""

    pid = 1
    record = SimpleNamespace(spec=SimpleNamespace(name="m", engine=SimpleNamespace(driver="vllm")))

    def __init__(self) -> None:
        self.http = self
        self.exited = asyncio.Event()
        self.loaded: list[str] = []
        self.is_asked = asyncio.Event()
        self.may_unload = asyncio.Event()

    @asynccontextmanager
    async def post(self, path: str, json: Mapping[str, str]) -> AsyncIterator[Any]:
        name = json["lora_name"]
        if path == LOAD_ADAPTER_PATH:
            self.loaded.append(name)
        else:
            self.is_asked.set()
            await self.may_unload.wait()
            self.loaded.remove(name)
        yield SimpleNamespace(status=200, content=self)

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield b"{}"


def an_adapter(name: str) -> RequestAdapter:
    artifact = Artifact(source=f"file:/{name}", files=(), digest=name * 64)
    return RequestAdapter(adapter_id=name, model_id="m", artifact=artifact)


async def test_a_request_given_up_while_another_adapter_is_unloaded_uses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its adapter stayed in the engine, and the others that were to go stayed there, too."""
    monkeypatch.setattr("nodeagent.host.engines.engine_adapters.LOADED_MAX", 1)
    adapters, folder = EngineAdapters(), Path("unused")
    engine: Any = SlowEngine()
    a, b, c, d = map(an_adapter, "abcd")
    # Both are in use, so neither goes.
    for adapter in (a, b):
        await adapters.load(adapter, folder, engine)
    for adapter in (a, b):
        adapters.end_use(adapter, engine)
    loading = asyncio.create_task(adapters.load(c, folder, engine))
    await engine.is_asked.wait()
    loading.cancel()
    engine.may_unload.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.loaded == ["m:c"]
    await adapters.load(d, folder, engine)
    assert engine.loaded == ["m:d"]


async def test_a_request_that_waited_for_an_engine_that_ended_leaves_the_next_ones_table() -> None:
    adapters, folder = EngineAdapters(), Path("unused")
    ended: Any = SlowEngine()
    running: Any = SlowEngine()
    a, b = map(an_adapter, "ab")
    await adapters.load(a, folder, ended)
    ended.exited.set()
    await adapters.load(a, folder, running)
    with pytest.raises(AdapterUnavailable, match="ended"):
        await adapters.load(b, folder, ended)
    assert ended.loaded == running.loaded == ["m:a"]
    # It is still known to be there.
    await adapters.load(a, folder, running)
    assert running.loaded == ["m:a"]


async def test_a_loaded_adapter_does_not_wait_for_another_that_is_being_loaded() -> None:
    """Each waited for up to 50 s, with a place in the engine that others waited for."""
    adapters, folder = EngineAdapters(), Path("unused")
    engine: Any = SlowEngine()
    a, b = map(an_adapter, "ab")
    await adapters.load(a, folder, engine)
    adapters.end_use(a, engine)
    is_loading = asyncio.Event()

    @asynccontextmanager
    async def hangs(path: str, json: Mapping[str, str]) -> AsyncIterator[Any]:
        is_loading.set()
        await asyncio.Event().wait()
        yield None

    engine.post = hangs
    loading = asyncio.create_task(adapters.load(b, folder, engine))
    async with asyncio.timeout(5.0):
        await is_loading.wait()
        await adapters.load(a, folder, engine)
    assert adapters._table._loaded["a"].users == 1
    loading.cancel()
    await asyncio.wait({loading})
