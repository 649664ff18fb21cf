"""Each peer may do rare things in a burst, then at a rate, whatever the others do."""

from scheduler.decide.membership.peer_limit import NAMES_MAX, PeerLimit


def test_a_peer_has_a_burst_and_then_a_rate_of_its_own() -> None:
    limit = PeerLimit(3, 10.0)
    assert [limit.take("a", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert limit.take("b", 0.0), "the others have theirs"
    assert not limit.take("a", 9.0)
    assert limit.take("a", 10.0)
    assert not limit.take("a", 10.0)
    assert [limit.take("a", 1000.0) for _ in range(4)] == [True, True, True, False]


def test_names_are_forgotten_once_they_do_not_matter() -> None:
    limit = PeerLimit(1, 10.0)
    for number in range(2 * NAMES_MAX):
        assert limit.take(f"n{number}", float(number))
    assert len(limit._until) <= NAMES_MAX + 1
    assert not limit.take(f"n{2 * NAMES_MAX - 1}", 2.0 * NAMES_MAX)
