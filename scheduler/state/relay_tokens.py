"""The tokens with which connected routers may use the batch service over HTTP."""

import secrets

from isochrone.wire.errors import ApiError, ErrorCode


class RelayTokens:
    """One token for each router's control connection, valid as long as that is open."""

    def __init__(self) -> None:
        """Start without routers."""
        self._routers: dict[str, str] = {}

    def issue(self, router: str) -> str:
        """Return a new token for a router's connection."""
        token = secrets.token_urlsafe(32)
        self._routers[token] = router
        return token

    def revoke(self, token: str) -> None:
        """Forget the token of a connection that has ended."""
        self._routers.pop(token, None)

    def router_of(self, token: str) -> str:
        """Return the router that a token belongs to. Raises ApiError 503."""
        # A token has 256 random bits: no timing of a dict lookup helps to guess one.
        router = self._routers.get(token)
        if router is None:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use files and batches now: the router's token is not valid (any more)",
                retry_after_s=1.0,
            )
        return router
