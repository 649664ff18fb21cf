"""Decides which requests to blame when an engine fails: those being processed, or the one on trial.

A request that was running when an engine failed is sent again, marked as a suspect by its router.
An engine tries one suspect at a time: it is on trial until its first token. If the engine fails
during a trial, only the suspect is blamed. Requests that had not reached the engine are not in this
ledger and never blamed. Requests that were sent to an engine after its failure, before its end was
known, are not blamed either.
"""

from dataclasses import dataclass
from typing import Final

EXIT_DELAY_S: Final = 1.0
"""An engine that exits within this time of its first broken connection was lost at that moment.
A process mostly closes the files of its devices last, which takes longest with a GPU."""


@dataclass(slots=True, eq=False)
class BlamableRequest:
    """One request that an engine is processing. `number` gives their order.

    `engine` is the process id of the engine.
    """

    number: int
    engine: int


class BlameLedger:
    """The requests that a replica's engine is processing."""

    def __init__(self) -> None:
        self._next_number = 0
        self._on_trial: BlamableRequest | None = None
        # The verdict on the last failure, for all requests below this number: they were running.
        self._lost_below = 0
        self._culprit: BlamableRequest | None = None
        self._failed_engine = -1
        self._failed_at_s = 0.0

    def begin(self, engine: int, *, is_on_trial: bool) -> BlamableRequest:
        """Note that a request goes to the engine with a process id; at most one is on trial."""
        request = BlamableRequest(self._next_number, engine)
        self._next_number += 1
        if is_on_trial:
            self._on_trial = request
        return request

    def end_trial(self, request: BlamableRequest) -> None:
        """Note a request's first token or its end; without effect if it is not on trial."""
        if self._on_trial is request:
            self._on_trial = None

    def is_late(self, request: BlamableRequest, now_s: float) -> bool:
        """Return whether a request that failed was sent after its engine had failed a moment ago.

        If that engine exits now, it was lost before the request came, which is then not to blame.
        """
        return (
            request.number >= self._lost_below
            and request.engine == self._failed_engine
            and now_s - self._failed_at_s <= EXIT_DELAY_S
        )

    def is_blamed(self, request: BlamableRequest, now_s: float) -> bool:
        """Return whether a request is blamed whose engine failed. Call it before `end_trial`.

        The first request that sees the failure decides for all that were running.
        """
        if request.number >= self._lost_below:
            self._lost_below = self._next_number
            self._culprit = self._on_trial
            self._failed_engine, self._failed_at_s = request.engine, now_s
        return self._culprit is None or self._culprit is request
