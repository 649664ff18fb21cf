"""The life cycle of one replica on this node, as a transition table.

Rule 1: every change of state is in TRANSITIONS; no other code assigns a state.
Rule 2: this module knows no process, device or clock. Its inputs are events.
"""

from enum import StrEnum
from typing import Final

from isochrone.wire.peers.report import ReplicaState

State = ReplicaState


class ReplicaEvent(StrEnum):
    """An event in the life of a replica."""

    FETCH_BEGAN = "fetch_began"
    ARTIFACT_READY = "artifact_ready"
    ENGINE_READY = "engine_ready"
    ENGINE_ADOPTED = "engine_adopted"
    BROKE = "broke"
    GAVE_UP = "gave_up"
    END_ORDERED = "end_ordered"
    DRAINED = "drained"


TRANSITIONS: Final[dict[tuple[State, ReplicaEvent], State]] = {
    (State.WANTED, ReplicaEvent.FETCH_BEGAN): State.FETCHING,
    (State.WANTED, ReplicaEvent.ENGINE_ADOPTED): State.LOADING,
    (State.WANTED, ReplicaEvent.GAVE_UP): State.FAILED,
    (State.FETCHING, ReplicaEvent.ARTIFACT_READY): State.LOADING,
    (State.LOADING, ReplicaEvent.ENGINE_READY): State.WARM,
    **{
        (state, ReplicaEvent.BROKE): State.WANTED
        for state in (State.FETCHING, State.LOADING, State.WARM)
    },
    **{
        (state, ReplicaEvent.END_ORDERED): State.DRAINING
        for state in (State.WANTED, State.FETCHING, State.LOADING, State.WARM, State.FAILED)
    },
    (State.DRAINING, ReplicaEvent.DRAINED): State.STOPPED,
}


class ImpossibleReplicaEvent(Exception):
    """An event that cannot happen in the current state: a bug in the agent."""


def next_state(state: State, event: ReplicaEvent) -> State:
    """Return the state after `event`. Raises ImpossibleReplicaEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleReplicaEvent(
            f"cannot apply event {event.value} to a {state.value} replica"
        ) from None
