"""Start-time fair queueing: assigns each request its position in the queue when it arrives.

Rule 1: virtual time is the number of tokens that the engine has computed. A request starts at the
current virtual time, so that equal requests are served in order of arrival.
Rule 2: the next request of a session starts after the cost of its last one. A session with a
hundred requests therefore alternates with a session that has one.
Rule 3: priority moves the start by a fixed number of tokens. Virtual time passes every such lead
after a while, so that low priority never starves.
"""

from dataclasses import dataclass
from typing import Final

PRIORITY_MAX: Final = 100
_PRIORITY_DEFAULT: Final = 50
_TOKENS_PER_PRIORITY: Final = 1000
_OUTPUT_TOKENS_CHARGED_MAX: Final = 256
"""Output tokens charged per answer at most: max_tokens is an upper bound, and rarely reached."""
_SESSIONS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """The parameters of a request that decide when it runs."""

    session: bytes = b""
    """Requests of one session share its position; without a session each has its own."""
    priority: int = _PRIORITY_DEFAULT
    """Higher is served earlier."""
    deadline_s: float | None = None
    """When the first token is of no more use, on the clock of `next_batch`'s `now_s`."""


class VirtualClock:
    """Assigns virtual start times, and remembers the virtual finish time of each session."""

    def __init__(self) -> None:
        self._virtual_time = 0
        self._session_finish: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"VirtualClock(now={self._virtual_time}, sessions={len(self._session_finish)})"

    def advance(self, tokens: int) -> None:
        """Advance virtual time by the tokens of a step."""
        self._virtual_time += tokens

    def assign_start(
        self, params: SchedulingParams, prompt_tokens: int, tokens_max: int, answers: int = 1
    ) -> int:
        """Return the virtual start of a request that arrives now; the lowest is served first."""
        start = self._virtual_time
        if params.session:
            start = max(start, self._session_finish.get(params.session, start))
            if len(self._session_finish) >= _SESSIONS_MAX:
                self._forget_sessions()
            cost = prompt_tokens + answers * min(tokens_max, _OUTPUT_TOKENS_CHARGED_MAX)
            self._session_finish[params.session] = start + cost
        return start - (params.priority - _PRIORITY_DEFAULT) * _TOKENS_PER_PRIORITY

    def _forget_sessions(self) -> None:
        """Forget the half of the sessions with the earliest finish: they gain the least by it."""
        by_finish = sorted(self._session_finish.items(), key=lambda item: item[1])
        self._session_finish = dict(by_finish[_SESSIONS_MAX // 2 :])
