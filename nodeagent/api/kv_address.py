"""Tells other nodes where the engine of a replica listens for engines that fetch its KV."""

from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent.supervisor import Supervisor


class KvAddressRoute:
    """Serves ADDRESS_PATH."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def attach(self, app: web.Application) -> None:
        """Add the route."""
        app.router.add_post(kv_transfer.ADDRESS_PATH, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        name = ReplicaId(request.headers.get(headers.REPLICA, ""))
        replica = self._supervisor.replicas.get(name)
        engine = replica.engine if replica is not None and replica.is_serving else None
        address = engine.record.command.kv_address if engine is not None else None
        if address is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot send KV: replica {name[:80]!r} does not")
        return json_response(address)
