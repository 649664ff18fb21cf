"""Who is refused at a node's door although the authority signed for it.

TLS asks only whether a certificate is the authority's and in its time. Which were revoked since,
the node knows by its assignment; it looks at each request, so that an open connection ends too.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from isochrone.service.identity import CLOCK_SKEW
from isochrone.wire import headers
from isochrone.wire.assignment import Revoked

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_revoked(shown: Mapping[str, Any], revoked: Sequence[Revoked]) -> bool:
    """Say whether a certificate, as the `ssl` module reads it, was revoked."""
    names = dict(pair for part in shown.get("subject", ()) for pair in part)
    peer = (names.get("organizationalUnitName"), names.get("commonName"))
    serial = f"{int(shown.get('serialNumber', '0'), 16):x}"
    # Issued a little in the past, for clocks that are behind.
    issued_at = ssl.cert_time_to_seconds(shown["notBefore"]) + CLOCK_SKEW.total_seconds()
    return any(
        (one.role, one.name) == peer
        and (one.serial == serial or (not one.serial and one.at > issued_at))
        for one in revoked
    )


def refuse_revoked(revoked: Callable[[], Sequence[Revoked]]) -> Any:
    """Return what turns away, at an application's door, who is `revoked` by now."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        listed = revoked()
        transport = request.transport
        shown = transport.get_extra_info("peercert") if listed and transport else None
        if shown and is_revoked(shown, listed):
            response = web.Response(status=403, headers={headers.REFUSED: "revoked"})
            response.force_close()
            return response
        return await handler(request)

    return middleware
