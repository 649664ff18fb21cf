"""How long a peer that lost its schedulers waits before it dials again."""

import pytest

from isochrone.service.network.control_link import BACKOFF_MAX_S, RedialBackoff

ROUNDS = 20
"""More than the backoff needs to reach its maximum."""


@pytest.mark.parametrize(
    ("redial_spread_s", "longest_s"),
    [(0.02, 1.0), (4.0, 4.0), (25.0, BACKOFF_MAX_S)],
    ids=["small fleet", "hundreds of peers", "thousands of peers"],
)
def test_a_known_fleet_is_dialled_as_often_as_it_can_register(
    redial_spread_s: float, longest_s: float
) -> None:
    """After an outage of the database, peers came back up to 20 s after the scheduler acted."""
    backoff = RedialBackoff()
    backoff.accepted(redial_spread_s)
    for _ in range(ROUNDS):
        backoff.round_failed()
    assert backoff.window_s == longest_s


def test_an_unknown_fleet_may_be_large() -> None:
    backoff = RedialBackoff()
    for _ in range(ROUNDS):
        backoff.round_failed()
    assert backoff.window_s == BACKOFF_MAX_S
