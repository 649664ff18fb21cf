"""The LoRA adapter that a request names: fetched, then admitted, then loaded, then used."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.peers.adapter import (
    MalformedAdapter,
    RequestAdapter,
    format_loaded_adapters,
    parse_request_adapter,
)
from nodeagent.drivers.request_body import with_fields
from nodeagent.host.engines.engine_adapters import (
    AdapterRefused,
    AdapterUnavailable,
    FetchedAdapter,
    LoadedAdapter,
    adapter_paths,
)
from nodeagent.managed_replica import ManagedReplica
from nodeagent.supervisor import Supervisor


def read_adapter(request: web.Request) -> RequestAdapter | None:
    """Return the adapter that a request names. Raises ApiError 400."""
    value = request.headers.get(headers.ADAPTER)
    if value is None:
        return None
    try:
        return parse_request_adapter(value)
    except MalformedAdapter as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error


@asynccontextmanager
async def fetched_adapter(
    request: web.Request, replica: ManagedReplica, supervisor: Supervisor
) -> AsyncIterator[FetchedAdapter | None]:
    """Fetch the adapter of a request, if it names one. Raises AdapterUnavailable."""
    adapter = read_adapter(request)
    if adapter is None:
        yield None
        return
    engine = replica.engine
    if engine is None or not adapter_paths(engine).load:
        raise AdapterUnavailable("the engine loads no adapters")
    if adapter.model_id != replica.spec.model_id:
        # During a rollout to another model, the other replicas have the adapter's.
        raise AdapterUnavailable(f"this replica serves {replica.spec.model_id}")
    async with replica.adapters.fetched(adapter, supervisor.adapter_fetcher.fetch) as fetched:
        yield fetched


@asynccontextmanager
async def loaded_adapter(
    adapter: FetchedAdapter | None, replica: ManagedReplica
) -> AsyncIterator[LoadedAdapter | None]:
    """Have the adapter of a request loaded in the engine.

    Raises AdapterUnavailable, and ApiError 400 if the engine refuses the adapter.
    """
    if adapter is None:
        yield None
        return
    engine = replica.engine
    if engine is None:
        raise AdapterUnavailable("the engine is starting")
    try:
        async with adapter.loaded(engine) as loaded:
            yield loaded
    except AdapterRefused as error:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, f"cannot use the adapter: {error}", param="model"
        ) from error


def with_adapter(body: bytes, adapter: LoadedAdapter | None) -> bytes:
    """Return a request body that names the adapter as the engine calls it. Raises ApiError 400."""
    return body if adapter is None else with_fields(body, {"model": adapter.name})


def add_loaded(response: web.StreamResponse, adapter: LoadedAdapter | None) -> None:
    """Tell the router which adapters the replica has loaded."""
    if adapter is not None:
        response.headers[headers.ADAPTERS] = format_loaded_adapters(adapter.loaded)
