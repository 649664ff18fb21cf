"""Serves the other nodes of the PoP that share KV: locates, sends and keeps blocks for them.

Rule 1: blocks are relayed between the engine and the other node, within the node's budget for KV.
Rule 2: a copy for another node is kept one at a time, and takes only memory that nothing else uses.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.ids import DeploymentId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.request.unfinished_bodies import UnfinishedBodies
from nodeagent.api.request.window_relay import relayed_answer, window_headers
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.kv_quota import KvQuota, KvUser
from nodeagent.disaggregation.kv_fetch import RelayToPeer
from nodeagent.disaggregation.kv_windows import WindowLeases, length_header
from nodeagent.disaggregation.prompt_copies import COPY_TIMEOUT_S, PAUSE_S
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.open_session import read_answer
from nodeagent.managed_replica import ManagedReplica

BODY_TIMEOUT_S: Final = 10.0

_KEEP: Final = msgspec.msgpack.Decoder(kv_sharing.KeepQuery)
_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)


class SharingReplica(NamedTuple):
    """The engine of a replica that shares KV, and the deployment that it counts for."""

    engine: EngineProcess
    deployment_id: DeploymentId
    replica_id: ReplicaId


class KvSharingRoutes:
    """Serves the blocks of this node's engines to other nodes, and keeps copies of theirs."""

    def __init__(
        self,
        replicas: Mapping[ReplicaId, ManagedReplica],
        peers: RelayToPeer,
        quota: KvQuota,
        windows: WindowLeases,
        clock: Callable[[], float],
        bodies: UnfinishedBodies,
    ) -> None:
        """`replicas` are those of this node. `clock` returns monotonic seconds."""
        self._bodies = bodies
        self._replicas = replicas
        self._peers = peers
        self._quota = quota
        self._windows = windows
        self._clock = clock
        self._keeping = asyncio.Lock()

    def attach(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_post(kv_sharing.LOCATE_PATH, self._locate)
        app.router.add_post(kv_sharing.BLOCKS_PATH, self._send)
        app.router.add_post(kv_sharing.KEEP_PATH, self._keep)

    def _find_replica(self, request: web.Request) -> SharingReplica:
        """Return the engine of the replica that another node names, if it shares KV."""
        name = ReplicaId(request.headers.get(headers.REPLICA, ""))
        replica = self._replicas.get(name)
        engine = replica.engine if replica is not None else None
        if (
            replica is None
            or engine is None
            or replica.state is not ReplicaState.WARM
            or not (engine.sends_kv and replica.spec.engine.share_kv)
        ):
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot share KV: replica {name[:80]!r} has none")
        return SharingReplica(engine, replica.spec.deployment_id, name)

    async def _read_query(self, request: web.Request) -> bytes:
        return await self._bodies.read(
            request, bytes_max=kv_sharing.QUERY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S
        )

    async def _locate(self, request: web.Request) -> web.Response:
        """Relay a query to the engine."""
        engine = self._find_replica(request).engine
        body = await self._read_query(request)
        try:
            async with engine.http.post(kv_sharing.LOCATE_PATH, data=body) as answer:
                return web.Response(
                    status=answer.status,
                    body=await read_answer(answer),
                    content_type="application/json",
                )
        except (aiohttp.ClientError, OSError) as error:
            raise _engine_failed(error) from error

    async def _send(self, request: web.Request) -> web.StreamResponse:
        """Relay an engine's blocks to the node that fetches them."""
        engine, deployment_id, replica_id = self._find_replica(request)
        user = KvUser(deployment_id)
        body = await self._read_query(request)
        self._check_quota(user)
        first = request.headers.get(kv_transfer.FIRST_BLOCK, "0")
        sent = {kv_transfer.FIRST_BLOCK: first}
        for name in (kv_sharing.COPY, kv_transfer.KV_FORMAT):
            if name in request.headers:
                sent[name] = request.headers[name]
        sent |= window_headers(request, self._windows, replica_id)
        response: web.StreamResponse | None = None
        try:
            async with engine.http.post(kv_sharing.BLOCKS_PATH, data=body, headers=sent) as answer:
                names = ("content-type", kv_transfer.WINDOW)
                relayed = await relayed_answer(request, answer, names)
                response = relayed.response
                await response.prepare(request)
                async for piece in relayed.chunks:
                    self._quota.take(user, len(piece), self._clock())
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError) as error:
            if response is None:
                raise _engine_failed(error) from error
            # The other node must see an abort, not a regular end: blocks are missing.
            if request.transport is not None:
                request.transport.abort()
            return response

    async def _keep(self, request: web.Request) -> web.Response:
        """Fetch what this node's engine lacks of a prefix, and keep it."""
        engine, deployment_id, _ = self._find_replica(request)
        user = KvUser(deployment_id)
        try:
            query = codec.decode(await self._read_query(request), _KEEP)
        except codec.MalformedFrame as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot keep KV: {error}") from error
        self._check_quota(user)
        if self._keeping.locked():
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot keep KV: another copy is being made",
                retry_after_s=1.0,
            )
        try:
            async with self._keeping, asyncio.timeout(COPY_TIMEOUT_S):
                return await self._fetch_copy(engine, query, user)
        except TimeoutError as error:
            reason = f"it was not copied within {COPY_TIMEOUT_S:g} s"
            raise ApiError(ErrorCode.UPSTREAM, f"cannot keep KV: {reason}") from error

    async def _fetch_copy(
        self, engine: EngineProcess, query: kv_sharing.KeepQuery, user: KvUser
    ) -> web.Response:
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=query.digests))
        try:
            async with engine.http.post(kv_sharing.LOCATE_PATH, data=body) as answer:
                located = codec.decode_json(await read_answer(answer), _LOCATED)
        except (aiohttp.ClientError, OSError, codec.MalformedFrame) as error:
            raise _engine_failed(error) from error
        lacking = query.digests[located.blocks :]
        if located.keep_blocks_max >= 0:
            lacking = lacking[: located.keep_blocks_max]
        if len(query.digests) == located.blocks:
            return json_response(located)
        if not lacking:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot keep KV: no memory is unused here",
                retry_after_s=PAUSE_S,
            )
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=lacking))
        sent = {headers.REPLICA: query.source.replica_id, kv_sharing.COPY: "1"}
        if located.kv_format:
            sent[kv_transfer.KV_FORMAT] = located.kv_format
        try:
            async with self._peers.relay(
                query.source, kv_sharing.BLOCKS_PATH, body, sent
            ) as blocks:
                if blocks.status == kv_transfer.OTHER_FORMAT_STATUS:
                    metrics.KV_OTHER_FORMAT.labels("copy").inc()
                if blocks.status != 200 or blocks.content_type != kv_transfer.CONTENT_TYPE:
                    raise PeerReplicaLost(f"{query.source.replica_id} answered {blocks.status}")
                return await self._give_to_engine(engine, lacking, blocks, user)
        except (PeerReplicaLost, aiohttp.ClientError, OSError) as error:
            raise ApiError(ErrorCode.UPSTREAM, f"cannot keep KV: {error}") from error

    async def _give_to_engine(
        self,
        engine: EngineProcess,
        digests: tuple[bytes, ...],
        blocks: aiohttp.ClientResponse,
        user: KvUser,
    ) -> web.Response:
        names = b"".join(digests)

        async def pieces() -> AsyncIterator[bytes]:
            yield names
            async for piece in blocks.content.iter_any():
                self._quota.take(user, len(piece), self._clock())
                yield piece

        sent = {kv_sharing.DIGEST_COUNT: str(len(digests)), **length_header(blocks, len(names))}
        async with engine.http.post(kv_sharing.KEEP_PATH, data=pieces(), headers=sent) as kept:
            return web.Response(
                status=kept.status, body=await read_answer(kept), content_type="application/json"
            )

    def _check_quota(self, user: KvUser) -> None:
        """Raise ApiError 429 if the link's budget for KV, or the deployment's, is spent."""
        now_s = self._clock()
        setting = ""
        if self._quota.link_bytes(now_s) <= 0:
            setting = "kv_share_bytes_per_s"
        elif self._quota.user_bytes(user, now_s) <= 0:
            setting = "kv_share_deployment_bytes_per_s"
        if setting:
            metrics.KV_SHARES_REFUSED.labels(setting).inc()
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot share KV: its budget is spent ({setting})",
                retry_after_s=1.0,
            )


def _engine_failed(error: Exception) -> ApiError:
    return ApiError(
        ErrorCode.UPSTREAM, f"cannot share KV: the engine failed ({type(error).__name__})"
    )
