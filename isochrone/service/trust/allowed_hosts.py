"""Refuses requests whose Host header is the name of a stranger's site: DNS rebinding.

A page in an operator's browser may have a name that its owner lets point to a server here. The
browser then takes that server's answers for the page's own. The Host header of such a request is
the page's name. Allowed without configuration are IP addresses, localhost, names without a dot (no
stranger owns one), and this machine's own names. An operator adds the names by which clients reach
the server, such as that of a load balancer.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from isochrone.wire.errors import ApiError, ErrorCode

ANY: Final = "*"
"""Allows every name: for a server behind a proxy that checks them."""

HOST_CHARS_SHOWN_MAX: Final = 100


class HostAllowList:
    """The names by which a server may be reached."""

    def __init__(self, names: Iterable[str]) -> None:
        """Allow `names`, in any case and with any port."""
        self._names = frozenset(name.strip().rstrip(".").lower() for name in names)

    def allows(self, host: str) -> bool:
        """Return whether a Host header's value may be served."""
        name = _name_of(host)
        if ANY in self._names or name in self._names:
            return True
        if name.startswith("["):
            return name.endswith("]") and _is_address(name[1:-1])
        if name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return True
        return bool(name) and "." not in name and ":" not in name


def own_names() -> frozenset[str]:
    """Return the names that this machine has for itself. Blocks."""
    return frozenset((socket.gethostname(), socket.getfqdn()))


def refuse_unknown_hosts(allow_list: HostAllowList, setting: str) -> Middleware:
    """Return a middleware that answers 403 to a name that is not allowed.

    `setting` is the operator's list, for the message.
    """

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("host", [""])
        if len(hosts) != 1 or not allow_list.allows(hosts[0]):
            shown = ascii(hosts[0][:HOST_CHARS_SHOWN_MAX])
            raise ApiError(
                ErrorCode.FORBIDDEN,
                f"cannot serve requests for host {shown}: if clients reach this server by that"
                f" name, add it to `{setting}`",
            )
        return await handler(request)

    return check_host


def _name_of(host: str) -> str:
    """Return a Host header's name or address, in lower case, without the port."""
    name, colon, port = host.strip().lower().rpartition(":")
    has_port = bool(colon) and (port.isdigit() or not port) and not name.endswith(":")
    return (name if has_port else host.strip().lower()).rstrip(".")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
