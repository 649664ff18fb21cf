"""Decides which links are fetched. Pure, but for the check of literal addresses.

A link has one reading: URLs that two parsers may read differently (user names, backslashes, escapes
or other alphabets in the host, numbers that some resolvers take for an address) are refused. The
rest of a link is sent as the client wrote it, because it may be signed.
"""

import re
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Final

from yarl import URL

from isochrone.service.network.public_addresses import refuse_private

HTTPS_PORT: Final = 443
LINK_CHARS_MAX: Final = 8000
"""Signed links have one or two thousand characters; servers take 8 kB."""

PRINTED_CHARS: Final = 120
NO_PUBLIC_ADDRESS: Final = "its host has no public address"
"""The reason whether a name is unknown or has a private address: clients must not learn names of
the network inside."""

_LABEL: Final = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_LINK: Final = re.compile(
    rf"https://(?P<host>(?:{_LABEL}\.)+{_LABEL})(?::(?P<port>[0-9]{{1,5}}))?"
    r"(?:[/?][!-\[\]-~]*)?"
)
_NUMBER: Final = re.compile(r"\.(?:[0-9]+|0[xX][0-9A-Fa-f]*)$")
"""The end of a host that is an address, and not a name (WHATWG, URL, "ends in a number")."""


class FetchRefused(Exception):
    """An image cannot be fetched; the text is the reason, for the client."""

    def __init__(self, outcome: str, reason: str) -> None:
        """`outcome` is a label of the metric."""
        super().__init__(reason)
        self.outcome = outcome


def parse_link(
    text: str, *, port: int = HTTPS_PORT, refuse: Callable[[str], None] = refuse_private
) -> URL:
    """Return a link that may be fetched, at this port. Raises FetchRefused.

    `refuse` raises OSError for an address that must not be used.
    """
    match = _LINK.fullmatch(text)
    if match is None or len(text) > LINK_CHARS_MAX:
        raise _refused(
            "it is no plain `https://` link: expected a public host name in ASCII (`xn--...` for"
            " others), no user name, and a path with other characters percent-encoded"
        )
    host = match["host"]
    if int(match["port"] or HTTPS_PORT) != port:
        raise _refused(f"its port is not {port}")
    if _NUMBER.search(host):
        try:
            # Of the forms of an address it accepts only the usual one.
            refuse(str(IPv4Address(host)))
        except (OSError, ValueError):
            raise _refused(NO_PUBLIC_ADDRESS) from None
    try:
        url = URL(text, encoded=True)
        is_same = (url.scheme, url.raw_host, url.port, url.user) == ("https", host, port, None)
    except ValueError:
        is_same = False
    if not is_same:
        raise _refused("it can be read in two ways")
    return url


def redirected(
    url: URL, location: str, *, port: int = HTTPS_PORT, refuse: Callable[[str], None]
) -> URL:
    """Return where a redirect leads, if that may be fetched. Raises FetchRefused."""
    try:
        target = str(url.join(URL(location, encoded=True)))
    except ValueError:
        target = ""
    try:
        return parse_link(target, port=port, refuse=refuse)
    except FetchRefused as refused:
        raise _refused(f"it redirects to a link that is not fetched: {refused}") from None


def printable(text: str) -> str:
    """Return a link without its query, which may hold a signature that grants access."""
    link = text.partition("?")[0]
    return link if len(link) <= PRINTED_CHARS else f"{link[:PRINTED_CHARS]}..."


def _refused(reason: str) -> FetchRefused:
    return FetchRefused("refused", reason)
