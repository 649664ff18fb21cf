"""What others have at a replica, by its own words, which reach a router late.

The older a word is, the nearer theirs is assumed to be to their usual load, by as much as such
words have proven to change.
"""

from typing import Final

LOAD_FRESH_S: Final = 10.0
"""How long a replica's word about its load is believed; over as long again it comes to nothing."""

SMOOTHING: Final = 0.1
"""How far one word moves the usual load of others and how much of it is taken to last."""


class OtherRoutersLoad:
    """What others have at one replica by its own words: the average, and how long swings last."""

    def __init__(self) -> None:
        self.decode = 0
        self.told_at_s = -1e18
        self._prefill = 0
        self._mean = 0.0
        self._swing = 0.0
        self._square = 0.0
        self._product = 0.0
        self._gap_s = 1.0
        self._lasting = 1.0
        """Which share of a swing is left after a usual gap between words."""

    def hear(self, prefill: int, decode: int, told_at_s: float) -> bool:
        """Take one word; False where a newer one came before it."""
        gap_s = told_at_s - self.told_at_s
        if gap_s <= 0:
            return False
        self.told_at_s = told_at_s
        self._prefill, self.decode = prefill, decode
        if gap_s > LOAD_FRESH_S:
            self._mean, self._swing = float(prefill), 0.0
            return True
        swing = prefill - self._mean
        self._square += SMOOTHING * (swing * swing - self._square)
        self._product += SMOOTHING * (swing * self._swing - self._product)
        self._gap_s += SMOOTHING * (gap_s - self._gap_s)
        self._swing = swing
        self._mean += SMOOTHING * swing
        if self._square > 0:
            self._lasting = min(1.0, max(0.01, self._product / self._square))
        return True

    def at(self, now_s: float) -> tuple[float, float, float]:
        """Return what others are likely to have there by now, in tokens: (told, usual, decode).

        To be read is what is left of its last word, and what is usual in place of the rest.
        """
        age_s = now_s - self.told_at_s
        left = min(1.0, 2.0 - age_s / LOAD_FRESH_S)
        if left <= 0.0:
            return 0.0, 0.0, 0.0
        lasting: float = self._lasting ** (max(0.0, age_s) / self._gap_s)
        usual = left * (1.0 - lasting) * self._mean
        return left * lasting * self._prefill, usual, left * self.decode
