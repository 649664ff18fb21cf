"""Tokens in flight on one replica, prefill and decode apart. Each is given back exactly once.

A router knows best what it sent itself; so each is told what is there of others, and of the prompt
being read only what is left: prompts are taken to be read in the order they came.
"""

from typing import Final

from isochrone.wire.headers import ReportedLoad

READ_MAX: Final = 0.95
"""A prompt that takes longer than thought is not read before its first token."""


class ReplicaAdmission:
    """Counts what a replica has taken on, against its bound."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.is_shut = False
        """Its engine refuses whatever is new: for want of memory, of which tokens say nothing."""
        self._prefill = 0
        self._unread = 0
        self._decode = 0
        self.running = 0
        """How many requests are in flight."""
        self._reading: dict[TokenReservation, None] = {}
        self._read_at_s = 0.0
        self._decode_of: dict[str, int] = {}

    def __repr__(self) -> str:
        return (
            f"<TokensInFlight {self._prefill}+{self._decode}/{self.tokens_max}, "
            f"{self.running} running>"
        )

    def take(
        self,
        prompt_tokens: int,
        output_tokens: int,
        unread_tokens: int | None = None,
        *,
        router: str = "",
        prefill_ms: float = 0.0,
        now_s: float = 0.0,
    ) -> "TokenReservation | None":
        """Take a request on, or return None where it does not fit. An idle replica takes any
        that its engine does not refuse.

        `unread_tokens` of its prompt, counted as at its beginning, are not cached here and take
        `prefill_ms`, as far as its router knows.
        """
        wanted = prompt_tokens + output_tokens
        is_full = self.running and self._prefill + self._decode + wanted > self.tokens_max
        if self.is_shut or is_full:
            return None
        unread = prompt_tokens if unread_tokens is None else unread_tokens
        self._prefill += prompt_tokens
        self._unread += unread
        self._decode += output_tokens
        self._decode_of[router] = self._decode_of.get(router, 0) + output_tokens
        self.running += 1
        held = TokenReservation(
            self, (prompt_tokens, output_tokens, unread), router, prefill_ms, now_s
        )
        self._reading[held] = None
        return held

    def load(self, router: str = "", now_s: float = 0.0) -> ReportedLoad:
        """Return the load as answers carry it; with `router`, also what of it is of others.

        Where nothing new is taken, all that is allowed is told: no router sees room.
        """
        decode = self._decode + (self.tokens_max if self.is_shut else 0)
        told = (self._prefill, decode, self.running, 0, self._unread)
        if not router:
            return ReportedLoad(*told)
        others = self.left(now_s, but=router)
        return ReportedLoad(*told, others, decode - self._decode_of.get(router, 0))

    def left(self, now_s: float, but: str | None = None) -> int:
        """Return what is still to be read, `but` what one router sent."""
        left = sum(held.unread for held in self._reading if held.router != but)
        first = next(iter(self._reading), None)
        if first is None or first.router == but or first.prefill_ms <= 0:
            return left
        took_ms = 1000 * (now_s - max(first.came_s, self._read_at_s))
        share = max(0.0, min(READ_MAX, took_ms / first.prefill_ms))
        return left - round(first.unread * share)

    def _was_read(self, held: "TokenReservation", prefill: int, now_s: float) -> None:
        """Count a prompt out: read, or given up. For Held."""
        del self._reading[held]
        self._read_at_s = max(self._read_at_s, now_s)
        self._prefill -= prefill
        self._unread -= held.unread

    def _ended(self, held: "TokenReservation", decode: int) -> None:
        """Count a request out. For Held."""
        self.running -= 1
        self._decode -= decode
        left = self._decode_of.get(held.router, 0) - decode
        if left:
            self._decode_of[held.router] = left
        else:
            self._decode_of.pop(held.router, None)


class TokenReservation:
    """What one request holds; idempotent to release."""

    __slots__ = (
        "_decode",
        "_is_read",
        "_of",
        "_prefill",
        "came_s",
        "prefill_ms",
        "router",
        "unread",
    )

    def __init__(
        self,
        of: ReplicaAdmission,
        tokens: tuple[int, int, int],
        router: str,
        prefill_ms: float,
        came_s: float,
    ) -> None:
        self._of: ReplicaAdmission | None = of
        self._is_read = False
        self._prefill, self._decode, self.unread = tokens
        self.router = router
        self.prefill_ms = prefill_ms
        self.came_s = came_s

    def first_token(self, now_s: float = 0.0) -> None:
        """The prompt is done: only its output is still ahead."""
        if not self._is_read and self._of is not None:
            self._is_read = True
            self._of._was_read(self, self._prefill, now_s)

    def release(self, now_s: float = 0.0) -> None:
        """Give back what is left: finished, cancelled or broken, it is all the same."""
        self.first_token(now_s)
        of, self._of = self._of, None
        if of is not None:
            of._ended(self, self._decode)
