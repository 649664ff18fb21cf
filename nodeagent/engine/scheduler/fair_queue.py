"""Whose turn it is: a place in the queue for each request, given once, when it arrives.

Rule 1: the clock is the work: it counts the tokens that the engine has computed. A request's turn
is what the clock shows when it comes, so among equals first come is first served.
Rule 2: a session's next request stands behind what its last one costs, so that a session with a
hundred requests and one with a single one are served in turn.
Rule 3: priority moves a turn by a fixed number of tokens. The clock passes every such lead in the
end, so nobody starves behind others' priority.
"""

from dataclasses import dataclass
from typing import Final

PRIORITY_MAX: Final = 100
_PRIORITY_USUAL: Final = 50
_TOKENS_PER_PRIORITY: Final = 1000
_OUTPUT_TOKENS_CHARGED_MAX: Final = 256
"""What an answer is charged at most: a request's max_tokens is a bound, seldom its length."""
_SESSIONS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request says of its own place. Higher priority is served earlier."""

    session: bytes = b""
    """Requests of one session share a place; without a session each is its own."""
    priority: int = _PRIORITY_USUAL
    deadline_s: float | None = None
    """When its first token is of no more use, by the clock that `next_batch` is told."""


class Turns:
    """Gives turns, and remembers where each session stands."""

    def __init__(self) -> None:
        self._now = 0
        self._sessions: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"Turns(now={self._now}, sessions={len(self._sessions)})"

    def pass_by(self, tokens: int) -> None:
        """Let the clock go on by the tokens of a step."""
        self._now += tokens

    def give(
        self, standing: Standing, prompt_tokens: int, tokens_max: int, answers: int = 1
    ) -> int:
        """Return the turn of a request that comes now; the least is served first."""
        turn = self._now
        if standing.session:
            turn = max(turn, self._sessions.get(standing.session, turn))
            if len(self._sessions) >= _SESSIONS_MAX:
                self._forget()
            cost = prompt_tokens + answers * min(tokens_max, _OUTPUT_TOKENS_CHARGED_MAX)
            self._sessions[standing.session] = turn + cost
        return turn - (standing.priority - _PRIORITY_USUAL) * _TOKENS_PER_PRIORITY

    def _forget(self) -> None:
        """Drop the half of the sessions that stand furthest in front: they lose the least."""
        standing = sorted(self._sessions.items(), key=lambda item: item[1])
        self._sessions = dict(standing[_SESSIONS_MAX // 2 :])
