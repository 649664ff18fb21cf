"""Tokens in flight on one replica, prefill and decode apart. Each is given back exactly once."""

from isochrone.wire.headers import Load


class TokensInFlight:
    """Counts what a replica has taken on, against its bound."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self._prefill = 0
        self._unread = 0
        self._decode = 0
        self._running = 0

    def __repr__(self) -> str:
        return (
            f"<TokensInFlight {self._prefill}+{self._decode}/{self.tokens_max}, "
            f"{self._running} running>"
        )

    @property
    def running(self) -> int:
        """Return how many requests are in flight."""
        return self._running

    def take(
        self, prompt_tokens: int, output_tokens: int, unread_tokens: int | None = None
    ) -> "Held | None":
        """Take a request on, or return None where it does not fit. An idle replica takes any.

        `unread_tokens` of its prompt are not cached here, as far as its router knows.
        """
        wanted = prompt_tokens + output_tokens
        if self._running and self._prefill + self._decode + wanted > self.tokens_max:
            return None
        unread = prompt_tokens if unread_tokens is None else min(unread_tokens, prompt_tokens)
        self._prefill += prompt_tokens
        self._unread += unread
        self._decode += output_tokens
        self._running += 1
        return Held(self, prompt_tokens, output_tokens, unread)

    def load(self) -> Load:
        """Return the load as answers carry it."""
        return Load(self._prefill, self._decode, self._running, 0, self._unread)

    def _give_back(self, prefill: int, decode: int, unread: int, ended: bool) -> None:
        self._prefill -= prefill
        self._unread -= unread
        self._decode -= decode
        self._running -= ended


class Held:
    """What one request holds; idempotent to release."""

    __slots__ = ("_decode", "_ended", "_of", "_prefill", "_unread")

    def __init__(self, of: TokensInFlight, prefill: int, decode: int, unread: int) -> None:
        self._of = of
        self._unread = unread
        self._prefill = prefill
        self._decode = decode
        self._ended = False

    def first_token(self) -> None:
        """The prompt is done: only its output is still ahead."""
        self._of._give_back(self._prefill, 0, self._unread, False)
        self._prefill = self._unread = 0

    def release(self) -> None:
        """Give back what is left: finished, cancelled or broken, it is all the same."""
        if not self._ended:
            self._ended = True
            self._of._give_back(self._prefill, self._decode, self._unread, True)
            self._prefill = self._decode = self._unread = 0
