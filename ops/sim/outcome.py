"""The outcome of a run of the simulation."""

from collections.abc import Sequence
from typing import NamedTuple


class ServedRequest(NamedTuple):
    """One request's result. A refused request has replica -1 and an infinite `ttft_s`."""

    number: int
    replica: int
    ttft_s: float
    itl_s: float
    prompt_tokens: int
    cached_tokens: int
    is_away: bool
    """Whether it was served outside the nearest PoP that has replicas."""


class SendEvent(NamedTuple):
    """One request sent by a PoP's router to a replica."""

    at_s: float
    pop: int
    replica: int


class RunOutcome(NamedTuple):
    """All requests of a run, and how busy each replica was."""

    served: Sequence[ServedRequest]
    busy: Sequence[float]
    errors_ms: Sequence[float]
    """Errors of our own predictions."""
    sends: Sequence[SendEvent]
