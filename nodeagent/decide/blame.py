"""Which requests to blame when an engine fails: those that it was processing, or the one on trial.

A request that was running when an engine failed is sent again, marked as a suspect by its router.
An engine tries one suspect at a time: it is on trial until its first token. If the engine fails
during a trial, only the suspect is blamed.
Requests that had not reached the engine are not in this ledger and never blamed.
"""


class BlamableRequest:
    """One request that an engine is processing. `number` gives their order."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BlameLedger:
    """The requests that a replica's engine is processing."""

    def __init__(self) -> None:
        """Start with none."""
        self._next_number = 0
        self._on_trial: BlamableRequest | None = None
        # The verdict on the last loss, for all requests below this number: they were running then.
        self._lost_below = 0
        self._culprit: BlamableRequest | None = None

    def begin(self, *, is_on_trial: bool) -> BlamableRequest:
        """Note that a request goes to the engine; at most one is on trial."""
        request = BlamableRequest(self._next_number)
        self._next_number += 1
        if is_on_trial:
            self._on_trial = request
        return request

    def end_trial(self, request: BlamableRequest) -> None:
        """Note a request's first token or its end; without effect if it is not on trial."""
        if self._on_trial is request:
            self._on_trial = None

    def is_blamed(self, request: BlamableRequest) -> bool:
        """Return whether a request is blamed whose engine failed. Call it before `end_trial`.

        The first request that sees the failure decides for all that were running.
        """
        if request.number >= self._lost_below:
            self._lost_below = self._next_number
            self._culprit = self._on_trial
        return self._culprit is None or self._culprit is request
