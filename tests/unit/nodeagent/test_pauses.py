"""Peers that are left alone after a failure."""

from nodeagent.decide.pauses import Pauses


def test_a_peer_is_left_alone_for_a_while() -> None:
    pauses: Pauses[str] = Pauses(10.0, 4)
    assert not pauses.is_paused("a", 0.0)
    pauses.begin("a", 100.0)
    assert pauses.is_paused("a", 109.9) and not pauses.is_paused("b", 109.9)
    assert not pauses.is_paused("a", 110.0)
    pauses.begin("a", 105.0)
    assert pauses.is_paused("a", 114.9)


def test_the_number_of_pauses_is_bounded() -> None:
    pauses: Pauses[int] = Pauses(10.0, 4)
    for peer in (*range(4), 0):
        pauses.begin(peer, 0.0)
    assert all(pauses.is_paused(peer, 1.0) for peer in range(4))
    pauses.begin(4, 1.0)
    assert [peer for peer in range(5) if pauses.is_paused(peer, 2.0)] == [4]
