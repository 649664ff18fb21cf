"""Which route of the public API a path is of, and which methods a path has."""

import re
from typing import Final

from router.apis.document.public_route import PublicRoute
from router.apis.document.routes import ROUTES

METHODS: Final = ("GET", "POST", "DELETE")
_ACCOUNT: Final = re.compile(r"^/client/v4/accounts/[^/]{1,64}(?=/ai/)")


def without_account(path: str) -> str:
    """Return a path of Workers AI without the account before it."""
    return _ACCOUNT.sub("", path)


def path_pattern(route: PublicRoute) -> re.Pattern[str]:
    """Return the pattern of a route's paths. Names of models may have slashes."""
    parts = re.split(r"\{\w+\}", route.path)
    any_name = ".+" if "{model}" in route.path else "[^/]+"
    return re.compile(any_name.join(re.escape(part) for part in parts))


_LITERAL: Final = frozenset(route.path for route in ROUTES if "{" not in route.path)
_ROUTES: Final = tuple((path_pattern(route), route.path, route.method) for route in ROUTES)
_BASES: Final = ("/v1", "/client/v4")
"""The ends of clients' base URLs. Those of Anthropic's clients end with neither."""
_SLASHES: Final = re.compile("//+")


def intended_path(path: str) -> str:
    """Return the route's path that a client with a wrong base URL meant; "" if there is none.

    The base URL may lack its end, have one of another client, or be a route's whole URL.
    """
    path = _SLASHES.sub("/", path).rstrip("/")
    ends = [path]
    ends += [path[len(base) :] for base in (*_BASES, *_LITERAL) if path.startswith(f"{base}/")]
    whole = (base + end for end in ends for base in ("", *_BASES))
    return next((candidate for candidate in whole if _is_known(candidate)), "")


def _is_known(path: str) -> bool:
    path = without_account(path)
    return any(pattern.fullmatch(path) for pattern, _, _ in _ROUTES)


def allow_line(path: str) -> str:
    """Return the header `Allow` with the methods of a path; with all methods for an unknown one."""
    path = without_account(path)
    found = {
        method
        for pattern, route_path, method in _ROUTES
        # `/v1/responses/input_tokens` is not a response of that id.
        if (path == route_path if path in _LITERAL else pattern.fullmatch(path))
    }
    methods = [method for method in METHODS if method in found or not found]
    return f"allow: {', '.join(methods)}, OPTIONS\r\n"
