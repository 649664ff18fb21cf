"""Loads the LoRA adapters that requests name into a replica's engine, when they are first needed.

A request brings the adapter's manifest along. So an engine that restarts, or another replica, loads
it again without a scheduler's order, and no adapter is placed in advance.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from isochrone.service.http_responses import read_response
from isochrone.service.threads import wait_to_completion
from isochrone.wire.peers.adapter import LoadedAdapters, RequestAdapter
from nodeagent import metrics
from nodeagent.decide.adapter_refusal import REASON_CHARS_MAX, refusal_reason
from nodeagent.decide.adapter_table import AdapterTable
from nodeagent.drivers import DRIVERS
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.engines.engine_process import EngineProcess

log = logging.getLogger(__name__)

LOADED_MAX: Final = 32
"""How many adapters an engine knows at once. Options of the engine (`adapters_max`,
`max_cpu_loras`) decide how many of them lie in its memory; it reads the others from disk."""

LOAD_TIMEOUT_S: Final = 50.0
"""Less than a router waits for a first byte by default."""

PROBE_TIMEOUT_S: Final = 4.0
ANSWER_BYTES_MAX: Final = 1024 * 1024

FETCHES_MAX: Final = 4
"""Adapters that a node fetches at once."""

Fetch = Callable[[RequestAdapter], Awaitable[Path]]


class AdapterUnavailable(Exception):
    """This node cannot load an adapter now; another may."""


class AdapterRefused(Exception):
    """The engine refuses an adapter. Every replica would, so the client gets the error."""


class AdapterFetcher:
    """Fetches the files of adapters, some at a time."""

    def __init__(self, artifacts: ArtifactStore, pinned: Callable[[], Collection[str]]) -> None:
        """`pinned` returns the digests that must stay on disk."""
        self._artifacts = artifacts
        self._pinned = pinned
        self._slots = asyncio.Semaphore(FETCHES_MAX)

    async def fetch(self, adapter: RequestAdapter) -> Path:
        """Return the folder of an adapter, fetching it if it is missing. Raises ArtifactError."""
        return await self._artifacts.ensure(
            adapter.artifact,
            self._pinned,
            lambda _: None,
            holders=adapter.holders,
            is_adapter=True,
            fetch_slots=self._slots,
        )


class EngineAdapters:
    """The adapters of one replica, whose engine may be replaced at any time."""

    def __init__(self) -> None:
        self._table = AdapterTable(LOADED_MAX)
        self._engine: EngineProcess | None = None
        self._load_lock = asyncio.Lock()
        self._fetched: dict[str, int] = {}
        """By digest, how many requests need files that may not be loaded yet."""

    @property
    def pinned(self) -> Collection[str]:
        """The digests of files that must stay on disk."""
        return {*self._table.digests, *self._fetched}

    @property
    def requested(self) -> Collection[str]:
        """The digests of files that requests need now."""
        return self._fetched.keys()

    @asynccontextmanager
    async def fetched(
        self, adapter: RequestAdapter, fetch: Fetch
    ) -> AsyncIterator["FetchedAdapter"]:
        """Fetch an adapter's files, and keep them on disk. Raises AdapterUnavailable."""
        digest = adapter.artifact.digest
        self._fetched[digest] = self._fetched.get(digest, 0) + 1
        began_s = monotonic()
        try:
            try:
                folder = await fetch(adapter)
            except ArtifactError as error:
                metrics.ADAPTER_LOADS.labels("not_fetched").inc()
                fields = {"adapter": adapter.adapter_id, "reason": str(error)}
                log.warning("adapter not fetched", extra={"fields": fields})
                raise AdapterUnavailable(str(error)) from error
            yield FetchedAdapter(self, adapter, folder, monotonic() - began_s)
        finally:
            self._fetched[digest] -= 1
            if not self._fetched[digest]:
                del self._fetched[digest]

    async def load(self, adapter: RequestAdapter, folder: Path, engine: EngineProcess) -> None:
        """Load an adapter into the engine unless it is, and begin to use it, unless this raises.

        Raises AdapterUnavailable and AdapterRefused.
        """
        if engine is self._engine and adapter.adapter_id in self._table:
            # An adapter that is loaded does not wait for others that are being loaded.
            self._table.begin_use(adapter.adapter_id)
            return
        async with self._load_lock:
            if engine is not self._engine:
                if engine.exited.is_set():
                    # The request waited, and the table is that of the next engine.
                    raise AdapterUnavailable("the engine ended")
                self._engine = engine
                self._table.clear()
            if adapter.adapter_id not in self._table:
                refused = self._table.refusal(adapter.artifact.digest)
                if refused:
                    raise AdapterRefused(refused)
                try:
                    await _load(engine, adapter, folder)
                except AdapterRefused as error:
                    self._table.refuse(adapter.artifact.digest, str(error))
                    raise
                self._table.add(adapter.adapter_id, adapter.artifact.digest)
            self._table.begin_use(adapter.adapter_id)
            try:
                # The table has forgotten them: what is not unloaded now never will be.
                await wait_to_completion(_unload_all(engine, self._table.take_surplus()))
            except BaseException:
                self._table.end_use(adapter.adapter_id)
                raise

    def end_use(self, adapter: RequestAdapter, engine: EngineProcess) -> None:
        """Note that a request no longer uses an adapter."""
        if engine is self._engine:
            self._table.end_use(adapter.adapter_id)

    def loaded(self, load_s: float) -> LoadedAdapters:
        """Return what is loaded now, for the router; this request's adapter took `load_s`."""
        return LoadedAdapters(round(1000 * load_s), tuple(self._table.names))


class FetchedAdapter:
    """One request's adapter, whose files are on disk."""

    def __init__(
        self, adapters: EngineAdapters, adapter: RequestAdapter, folder: Path, fetch_s: float
    ) -> None:
        self._adapters = adapters
        self._adapter = adapter
        self._folder = folder
        self._load_s = fetch_s

    @asynccontextmanager
    async def loaded(self, engine: EngineProcess) -> AsyncIterator["LoadedAdapter"]:
        """Have the adapter loaded in `engine` meanwhile.

        Raises AdapterUnavailable and AdapterRefused.
        """
        began_s = monotonic()
        await self._adapters.load(self._adapter, self._folder, engine)
        self._load_s += monotonic() - began_s
        try:
            name = engine_name(engine, self._adapter.adapter_id)
            loaded = self._adapters.loaded(self._load_s)
            yield LoadedAdapter(name, engine.pid, loaded)
        finally:
            self._adapters.end_use(self._adapter, engine)


class LoadedAdapter(msgspec.Struct, frozen=True):
    """A request's adapter in an engine: its name there, the engine, and all that it has loaded."""

    name: str
    engine_pid: int
    loaded: LoadedAdapters


class AdapterPaths(NamedTuple):
    """The paths of an engine that load a LoRA adapter and forget it; "" if it cannot."""

    load: str
    unload: str


def adapter_paths(engine: EngineProcess) -> AdapterPaths:
    """Return where an engine loads and forgets adapters."""
    driver = DRIVERS[engine.record.spec.engine.driver]
    return AdapterPaths(driver.load_adapter_path, driver.unload_adapter_path)


def engine_name(engine: EngineProcess, adapter_id: str) -> str:
    """Return what an engine calls an adapter. Clients see it as the `model` of an answer."""
    return f"{engine.record.spec.name}:{adapter_id}"


async def _load(engine: EngineProcess, adapter: RequestAdapter, folder: Path) -> None:
    """Let the engine load an adapter. Raises AdapterUnavailable and AdapterRefused."""
    name = engine_name(engine, adapter.adapter_id)
    fields = {"lora_name": name, "lora_path": str(folder)}
    began_s = monotonic()
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            async with engine.http.post(adapter_paths(engine).load, json=fields) as response:
                answer = await read_response(response, ANSWER_BYTES_MAX)
                status = response.status
            # An earlier agent, or a request whose client left, may have had it loaded.
            if 400 <= status < 500 and name in await _model_names(engine):
                status = 200
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        metrics.ADAPTER_LOADS.labels("failed").inc()
        raise AdapterUnavailable(f"the engine did not load it: {type(error).__name__}") from error
    if status == 200:
        metrics.ADAPTER_LOADS.labels("loaded").inc()
        took_ms = round(1000 * (monotonic() - began_s))
        shown = {"adapter": adapter.adapter_id, "ms": took_ms}
        log.info("adapter loaded", extra={"fields": shown})
        return
    message = _error_message(answer).replace(str(folder), adapter.adapter_id)
    reason = refusal_reason(status, message)
    shown = {"adapter": adapter.adapter_id, "status": status, "reason": message[:REASON_CHARS_MAX]}
    log.warning("adapter not loaded", extra={"fields": shown})
    if not reason:
        metrics.ADAPTER_LOADS.labels("failed").inc()
        raise AdapterUnavailable(f"the engine answered {status}")
    metrics.ADAPTER_LOADS.labels("refused").inc()
    raise AdapterRefused(reason)


async def _unload_all(engine: EngineProcess, adapter_ids: Collection[str]) -> None:
    for adapter_id in adapter_ids:
        await _unload(engine, engine_name(engine, adapter_id))


async def _unload(engine: EngineProcess, name: str) -> None:
    """Let the engine forget an adapter; requests that run with it continue."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with (
            asyncio.timeout(PROBE_TIMEOUT_S),
            engine.http.post(adapter_paths(engine).unload, json={"lora_name": name}) as response,
        ):
            if response.status == 200:
                metrics.ADAPTER_LOADS.labels("unloaded").inc()


async def _model_names(engine: EngineProcess) -> Collection[str]:
    async with asyncio.timeout(PROBE_TIMEOUT_S), engine.http.get("/v1/models") as response:
        answer = await read_response(response, ANSWER_BYTES_MAX)
    try:
        return [row["id"] for row in msgspec.json.decode(answer)["data"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ()


def _error_message(answer: bytes) -> str:
    """Return the message of an engine's error answer, "" if it has none."""
    try:
        fields: Any = msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return ""
    error = fields.get("error", fields) if isinstance(fields, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
