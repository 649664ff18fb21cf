"""Refuses revoked certificates at a node's HTTP server.

TLS checks only that the authority issued a certificate and that it has not expired. A node learns
of revocations with its assignment and checks each request, so open connections are refused too.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from isochrone.service.trust.identity import CLOCK_SKEW
from isochrone.wire.http import headers
from isochrone.wire.peers.assignment import RevokedCertificate

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_revoked(peercert: Mapping[str, Any], revocations: Sequence[RevokedCertificate]) -> bool:
    """Say whether a certificate, as `ssl.SSLSocket.getpeercert` returns it, was revoked."""
    names = subject_of(peercert)
    subject = (names.get("organizationalUnitName"), names.get("commonName"))
    serial = f"{int(peercert.get('serialNumber', '0'), 16):x}"
    # notBefore is dated back by CLOCK_SKEW, for clocks that are behind.
    issued_at = ssl.cert_time_to_seconds(peercert["notBefore"]) + CLOCK_SKEW.total_seconds()
    return any(
        (revoked.role, revoked.name) == subject
        and (revoked.serial == serial or (not revoked.serial and revoked.at > issued_at))
        for revoked in revocations
    )


def subject_of(peercert: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a certificate's subject, by OpenSSL's names of their kinds."""
    return dict(pair for part in peercert.get("subject", ()) for pair in part)


def refuse_revoked(revocations: Callable[[], Sequence[RevokedCertificate]]) -> Any:
    """Return a middleware that answers 403 to clients whose certificate is revoked by now."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        revoked = revocations()
        transport = request.transport
        peercert = transport.get_extra_info("peercert") if revoked and transport else None
        if peercert and is_revoked(peercert, revoked):
            response = web.Response(status=403, headers={headers.REFUSED: "revoked"})
            response.force_close()
            return response
        return await handler(request)

    return middleware
