"""The query parameters of public routes. One that a route does not have is refused, not ignored."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.document.openapi import parameter_types
from router.apis.document.public_route import PublicRoute
from router.apis.document.route_paths import path_pattern, without_account
from router.apis.document.routes import ROUTES
from router.apis.messages.schema import COUNT_TOKENS_PATH, MESSAGES_PATH

_STORED: Final = frozenset({"include", "include[]", "include_obfuscation"})

BESIDE: Final[Mapping[str, frozenset[str]]] = {
    # Anthropic's clients send `beta=true`; its features are fields and headers.
    **{path: frozenset({"beta"}) for path in (MESSAGES_PATH, COUNT_TOKENS_PATH)},
    **{
        route.path: _STORED
        for route in ROUTES
        if route.path.startswith(("/v1/responses/{", "/v1/conversations"))
    },
    "/ai/finetunes/public": frozenset({"order_by"}),
}
"""Parameters that are accepted beside those in a route's description. The code of stored responses
refuses most values of theirs itself."""

_UNCHECKED: Final = ("/v1/models", "/v1/models/{model}")
"""OpenAI's lists have no parameters, and clients add their version. The code of Anthropic's list
checks its own."""


class _Query:
    """The names of the query parameters of the routes with one path pattern and method."""

    __slots__ = ("method", "names", "pattern")

    def __init__(self, route: PublicRoute) -> None:
        self.pattern = path_pattern(route)
        self.method = route.method
        self.names = frozenset(parameter_types(route)) | BESIDE.get(route.path, frozenset())


_QUERIES: Final = tuple(
    _Query(route) for route in ROUTES if route.surface != "open" and route.path not in _UNCHECKED
)


def check_query(method: str, path: str, query: str) -> None:
    """Raise ApiError 400 for a parameter that the route of a request does not have.

    Requests without a route are refused elsewhere.
    """
    path = without_account(path)
    known = next((q for q in _QUERIES if q.method == method and q.pattern.fullmatch(path)), None)
    if known is None:
        return
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name not in known.names:
            listed = ", ".join(sorted(known.names)) or "none"
            message = f"cannot use the query parameter {name[:80]!r}: this path has {listed}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message, param=name[:80])
