"""Clocks of peers: which are wrong, and which messages are only late."""

import math

import pytest

from scheduler.decide.membership.peer_clock import SUSTAINED_S, WRONG_S, PeerClock, clock_problem

NOW = 1_800_000_000.0
HOUR_S = 3600.0


def recorded(*messages: tuple[float, float]) -> tuple[PeerClock, list[bool]]:
    """Return a clock after messages, each by how far it is behind and when it arrived."""
    clock = PeerClock()
    return clock, [clock.record(NOW + at_s - off_s, NOW + at_s, at_s) for off_s, at_s in messages]


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S, WRONG_S + 1.0])
def test_a_clock_that_is_wrong_for_some_time_is_known_once(off_s: float) -> None:
    clock, known = recorded((off_s, 0.0), (off_s, 10.0), (off_s, SUSTAINED_S), (off_s, 60.0))
    assert known == [False, False, True, False]
    assert clock.behind_s == off_s


def test_messages_that_waited_while_a_process_hung_say_nothing_of_a_clock() -> None:
    """They arrive together, the newest last."""
    clock, known = recorded(*((late_s, 100.0) for late_s in range(90, 0, -2)), (0.1, 102.0))
    assert not any(known)
    assert clock.behind_s == 0.0


def test_a_clock_that_is_set_right_is_known_at_once() -> None:
    clock, known = recorded((HOUR_S, 0.0), (HOUR_S, 30.0), (1.0, 32.0), (HOUR_S, 34.0))
    assert known == [False, True, False, False]
    assert clock.behind_s == 0.0


@pytest.mark.parametrize("sent_at", [0.0, math.nan, math.inf, -math.inf])
def test_a_peer_that_does_not_say_the_time_has_no_wrong_clock(sent_at: float) -> None:
    clock = PeerClock()
    assert not any(clock.record(sent_at, NOW, at_s) for at_s in (0.0, 60.0))
    assert clock.behind_s == 0.0


def test_a_problem_says_who_and_how_far() -> None:
    assert clock_problem("node n1", 0.0) == ""
    assert "node n1: its clock is 3600 s behind the acting" in clock_problem("node n1", HOUR_S)
    assert "router r: its clock is 90 s ahead of the acting" in clock_problem("router r", -90.0)
