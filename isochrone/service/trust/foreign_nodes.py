"""Refuses nodes of other PoPs at a node's HTTP server, except for what they fetch there.

TLS admits every certificate of the cluster. The nodes of one PoP hand requests off to each other
and share KV; a node of another PoP only fetches artifacts. So a node that was broken into can send
no requests to the replicas of other PoPs, and learn nothing from their prefix caches.
"""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from isochrone.service.trust.revocation import Handler, subject_of
from isochrone.wire.http import headers
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import PeerRole

FOR_ALL_NODES: Final = ("/v1/artifacts/", "/ping", "/healthz", "/metrics")
"""Where paths begin that nodes of all PoPs may use."""


def is_foreign_node(peercert: Mapping[str, Any], pop: PopId) -> bool:
    """Say whether a certificate is that of a node of another PoP."""
    names = subject_of(peercert)
    is_node = names.get("organizationalUnitName") == PeerRole.AGENT
    return is_node and names.get("localityName") != pop


def refuse_foreign_nodes(pop: PopId) -> Any:
    """Return a middleware that answers 403 to nodes of PoPs other than `pop`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith(FOR_ALL_NODES) and request.transport is not None:
            peercert = request.transport.get_extra_info("peercert")
            if peercert and is_foreign_node(peercert, pop):
                response = web.Response(status=403, headers={headers.REFUSED: "foreign_node"})
                response.force_close()
                return response
        return await handler(request)

    return middleware
