"""The tokens with which connected peers may use the HTTP routes beside the control connection."""

import secrets

from isochrone.wire.errors import ApiError, ErrorCode


class RelayTokens:
    """One token for each control connection of a kind of peer, valid as long as that is open.

    Routers and agents have tokens of their own: neither may use the other's routes.
    """

    def __init__(self) -> None:
        self._peers: dict[str, str] = {}

    def issue(self, peer: str) -> str:
        """Return a new token for a peer's connection."""
        token = secrets.token_urlsafe(32)
        self._peers[token] = peer
        return token

    def revoke(self, token: str) -> None:
        """Forget the token of a connection that has ended."""
        self._peers.pop(token, None)

    def peer_of(self, token: str) -> str:
        """Return the peer that a token belongs to. Raises ApiError 503."""
        # A token has 256 random bits: no timing of a dict lookup helps to guess one.
        peer = self._peers.get(token)
        if peer is None:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use what the scheduler stores now: the peer's token is not valid (any"
                " more)",
                retry_after_s=1.0,
            )
        return peer
