"""Shares a limit of this process, of bytes or requests, between tenants or nodes.

Rule 1: no holder may have more than is still free. So a holder alone gets half, and a later one
always gets some, whatever the others hold.
"""


class FairShares:
    """How much each holder has, at most `most` together."""

    def __init__(self, most: int) -> None:
        """Start empty."""
        self.total = 0
        self._most = most
        self._held: dict[str, int] = {}

    def take(self, holder: str, count: int) -> bool:
        """Count `count` until `give_back`; return False and count none beyond the holder's share.

        0 always fits.
        """
        own = self._held.get(holder, 0) + count
        if count and own > self._most - self.total:
            return False
        if own:
            self._held[holder] = own
        self.total += count
        return True

    def lacking(self, holder: str, count: int) -> int:
        """Return how much others must give back before `count` more fit; 0 or less for nothing."""
        return self._held.get(holder, 0) + count - (self._most - self.total)

    def is_own_share(self, holder: str, count: int) -> bool:
        """Return whether `count` more do not fit only because of what this holder has."""
        own = self._held.get(holder, 0)
        return own + count > self._most - own

    def give_back(self, holder: str, count: int) -> None:
        """Stop counting what was taken."""
        self.total -= count
        own = self._held.get(holder, 0) - count
        if own:
            self._held[holder] = own
        else:
            self._held.pop(holder, None)
