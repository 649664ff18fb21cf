"""Decides how long a process waits for more tokens before it looks for them again.

Waking a process costs more than relaying a token. While many streams run and nothing else does, the
process therefore sleeps until `gather_s` after its last wake-up, and one wake-up serves the tokens
of all streams that came meanwhile. A token waits for at most `gather_s`. Whenever something else
happened since the last wake-up (a request was sent, an answer came) there is no pause, so requests
are not slowed where they are many; with few tokens a pause would gather nothing, and there is none.
"""

from typing import Final

WINDOW_S: Final = 0.1
"""The rate of tokens is counted over windows of this length."""

TOKENS_PER_PAUSE_MIN: Final = 1.0
"""Pauses begin at a rate at which this many tokens come during one."""

PAUSE_MIN_S: Final = 0.0001
"""A shorter pause is not worth its system call."""


class TokenGathering:
    """The pauses of one process."""

    def __init__(self, gather_s: float) -> None:
        """Let tokens gather for `gather_s`; 0: never."""
        self._gather_s = gather_s
        self._tokens = 0
        self._others = 0
        self._window_tokens = 0
        self._window_began_s = 0.0
        self._woke_at_s = 0.0
        self._is_worthwhile = False

    def note_token(self) -> bool:
        """Count received bytes of a running stream; return whether they are the first of a turn."""
        self._tokens += 1
        return self._tokens == 1

    def note_other(self) -> None:
        """Count an event that is no token of a running stream."""
        self._others += 1

    def pause_s(self, now_s: float) -> float:
        """Return how long to sleep at the end of a turn of the event loop that relayed tokens."""
        has_others = self._others > 0
        self._window_tokens += self._tokens
        self._tokens = self._others = 0
        elapsed_s = now_s - self._window_began_s
        if elapsed_s >= WINDOW_S:
            per_pause = self._window_tokens * self._gather_s / elapsed_s
            self._is_worthwhile = per_pause >= TOKENS_PER_PAUSE_MIN
            self._window_began_s, self._window_tokens = now_s, 0
        pause_s = self._woke_at_s + self._gather_s - now_s
        if has_others or not self._is_worthwhile or pause_s < PAUSE_MIN_S:
            self._woke_at_s = now_s
            return 0.0
        if pause_s > self._gather_s:
            pause_s = self._gather_s
        self._woke_at_s = now_s + pause_s
        return pause_s
