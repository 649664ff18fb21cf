"""Refuses peers at a node's HTTP server. TLS admits every certificate of the cluster.

Rule 1: a revoked certificate is refused. A node learns of revocations with its assignment, and
checks each request, so open connections are refused too.
Rule 2: a node of another PoP may only fetch artifacts. The nodes of one PoP hand requests off to
each other and share KV. So a node that was broken into can send no requests to the replicas of
other PoPs, and learn nothing from their prefix caches.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from isochrone.service.trust.identity import CLOCK_SKEW
from isochrone.wire.http import headers
from isochrone.wire.ids import PopId
from isochrone.wire.peers.assignment import RevokedCertificate
from isochrone.wire.peers.control import PeerRole

FOR_ALL_NODES: Final = ("/v1/artifacts/", "/ping", "/healthz", "/metrics")
"""Where paths begin that nodes of all PoPs may use."""


def refuse_peers(pop: PopId, revocations: Callable[[], Sequence[RevokedCertificate]]) -> Middleware:
    """Return a middleware of a node in `pop`, which answers 403 and names the rule."""

    @web.middleware
    async def check_peer(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        peercert = transport.get_extra_info("peercert") if transport else None
        refusal = _refusal(peercert, request.path, pop, revocations()) if peercert else ""
        if refusal:
            response = web.Response(status=403, headers={headers.REFUSED: refusal})
            response.force_close()
            return response
        return await handler(request)

    return check_peer


def _refusal(
    peercert: Mapping[str, Any], path: str, pop: PopId, revocations: Sequence[RevokedCertificate]
) -> str:
    """Return why a peer is refused, or "".

    `peercert` is its certificate, as `ssl.SSLSocket.getpeercert` returns it.
    """
    subject = dict(pair for part in peercert.get("subject", ()) for pair in part)
    role = subject.get("organizationalUnitName")
    if revocations and _is_revoked(peercert, role, subject.get("commonName"), revocations):
        return "revoked"
    is_foreign_node = role == PeerRole.AGENT and subject.get("localityName") != pop
    return "foreign_node" if is_foreign_node and not path.startswith(FOR_ALL_NODES) else ""


def _is_revoked(
    peercert: Mapping[str, Any],
    role: str | None,
    name: str | None,
    revocations: Sequence[RevokedCertificate],
) -> bool:
    serial = f"{int(peercert.get('serialNumber', '0'), 16):x}"
    # As `Certificate.issued_at`.
    issued_at = ssl.cert_time_to_seconds(peercert["notBefore"]) + CLOCK_SKEW.total_seconds()
    return any(
        (revoked.role, revoked.name) == (role, name)
        and (revoked.serial == serial or (not revoked.serial and revoked.at > issued_at))
        for revoked in revocations
    )
