"""Routers draw from a key's limits what it has used at the others."""

from collections.abc import Coroutine, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire import codec
from isochrone.wire.client_keys.key_use import (
    KEY_USE,
    KEY_USE_ROWS_MAX,
    REQUESTS_MAX,
    TOKENS_MAX,
    FleetKeyUse,
    KeyUse,
)
from isochrone.wire.ids import KeyId
from router.decide.admission.limits import (
    BURST_S,
    ELSEWHERE_DEBT_MAX_S,
    KeyLimiter,
    LimitExceeded,
)
from router.sharing.key_use_sharing import ROWS_PER_SLICE, KeyUseOutbox, draw_in_slices
from scheduler.loops.share_key_use import ShareKeyUse
from scheduler.state import key_use_exchange
from scheduler.state.key_use_exchange import KeyUseExchange
from tests.unit.router.test_limits import NOON, a_key

KEY = a_key(requests_per_min=60, tokens_per_min=6000)
ID = KEY.key_id


def is_admitted(limiter: KeyLimiter, now_s: float, tokens: int = 10) -> bool:
    try:
        limiter.admit(KEY, tokens, now_s, NOON).settle(tokens, now_s)
    except LimitExceeded:
        return False
    return True


def test_what_was_drawn_is_told_once_and_corrected() -> None:
    limiter = KeyLimiter()
    limiter.admit(a_key("free"), 10, 0.0, NOON)
    first = limiter.admit(KEY, 100, 0.0, NOON)
    limiter.admit(KEY, 50, 0.0, NOON).settle(60, 0.0)
    assert limiter.take_unshared() == [KeyUse(ID, 2, 160)]
    assert limiter.take_unshared() == []
    first.settle(30, 1.0)
    assert limiter.take_unshared() == [KeyUse(ID, 0, -70)]
    assert limiter.take_unshared() == []
    is_admitted(limiter, 2.0)
    limiter.forget([ID])
    assert limiter.take_unshared() == []


@pytest.mark.parametrize("processes", [1, 4])
def test_use_elsewhere_is_drawn_by_the_share_of_each_process(processes: int) -> None:
    limiter = KeyLimiter(processes)
    limiter.draw_elsewhere(KEY, KeyUse(ID, 60, 0), 0.0, NOON)
    assert not is_admitted(limiter, 0.0)
    assert is_admitted(limiter, 1.0 * processes)
    assert limiter.take_unshared() == [KeyUse(ID, 1, 10)]
    tokens = KeyLimiter(processes)
    tokens.draw_elsewhere(KEY, KeyUse(ID, 0, 6000), 0.0, NOON)
    assert not is_admitted(tokens, 0.0)
    tokens.draw_elsewhere(KEY, KeyUse(ID, 0, -6000), 0.0, NOON)
    assert is_admitted(tokens, 0.0)


def test_use_that_a_router_forges_blocks_a_key_for_an_hour_at_most() -> None:
    """One message blocked a key at each router for years, until the router was restarted."""
    limiter = KeyLimiter()
    limiter.draw_elsewhere(KEY, KeyUse(ID, REQUESTS_MAX, TOKENS_MAX), 0.0, NOON)
    limiter.draw_elsewhere(KEY, KeyUse(ID, REQUESTS_MAX, TOKENS_MAX), 0.0, NOON)
    assert not is_admitted(limiter, ELSEWHERE_DEBT_MAX_S - BURST_S - 1.0)
    assert is_admitted(limiter, ELSEWHERE_DEBT_MAX_S)


def test_what_a_key_owes_of_its_own_requests_is_not_forgiven() -> None:
    limiter = KeyLimiter()
    limiter.admit(KEY, 2 * 6000 * 60, 0.0, NOON)
    limiter.draw_elsewhere(KEY, KeyUse(ID, 0, 1), 0.0, NOON)
    assert not is_admitted(limiter, ELSEWHERE_DEBT_MAX_S)


def test_routers_can_read_what_a_router_has_forged() -> None:
    """Each other router dropped its connection to the scheduler, once a second."""
    exchange = KeyUseExchange()
    exchange.add("a", [KeyUse(ID, REQUESTS_MAX, TOKENS_MAX)] * 3)
    exchange.add("b", [KeyUse(ID, 1, 1), KeyUse(KeyId("o"), 0, -TOKENS_MAX)])
    exchange.add("b", [KeyUse(KeyId("o"), 0, -TOKENS_MAX)])
    reader = codec.decoder(FleetKeyUse)
    told = {
        name: codec.decode(codec.encode(FleetKeyUse(rows)), reader).rows
        for name, rows in exchange.take(["b", "c"])
    }
    assert told["b"] == (KeyUse(ID, REQUESTS_MAX, TOKENS_MAX),)
    assert told["c"] == (*told["b"], KeyUse(KeyId("o"), 0, -TOKENS_MAX))


def test_a_forged_name_of_a_key_is_short() -> None:
    """The scheduler passes rows on to all routers."""
    sent = codec.encode(FleetKeyUse((KeyUse(KeyId("k" * 257), 1, 0),)))
    with pytest.raises(codec.MalformedFrame, match="length <= 256"):
        codec.decode(sent, codec.decoder(FleetKeyUse))


def test_the_exchange_tells_each_router_of_the_others() -> None:
    exchange = KeyUseExchange()
    other = KeyId("o")
    exchange.add("a", [KeyUse(ID, 2, 20), KeyUse(other, 1, 5)])
    exchange.add("b", [KeyUse(ID, 3, 30)])
    exchange.add("b", [KeyUse(ID, 1, -5)])
    told = dict(exchange.take(["a", "b", "c"]))
    assert told == {
        "a": (KeyUse(ID, 4, 25),),
        "b": (KeyUse(ID, 2, 20), KeyUse(other, 1, 5)),
        "c": (KeyUse(ID, 6, 45), KeyUse(other, 1, 5)),
    }
    assert dict(exchange.take(["a", "b"])) == {}


def test_use_of_many_keys_is_told_in_messages_that_routers_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_use_exchange, "KEY_USE_ROWS_MAX", 2)
    exchange = KeyUseExchange()
    rows = [KeyUse(KeyId(f"k{n}"), n + 1, 0) for n in range(5)]
    exchange.add("a", rows[:1])
    exchange.add("b", rows[1:])
    told = list(exchange.take(["a", "b", "c"]))
    assert all(len(part) <= 2 for _, part in told)
    for name, expected in (("a", rows[1:]), ("b", rows[:1]), ("c", rows)):
        assert [row for router, part in told if router == name for row in part] == expected
    # What comes while they are sent is for the next turn.
    messages = exchange.take(["a"])
    exchange.add("b", rows)
    assert list(messages) == []
    assert [len(part) for _, part in exchange.take(["a"])] == [2, 2, 1]


def test_the_exchange_has_a_limit_of_keys_and_still_counts_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_use_exchange, "KEYS_MAX", 2)
    exchange = KeyUseExchange()
    exchange.add("a", [KeyUse(KeyId(f"k{n}"), 1, 0) for n in range(4)])
    exchange.add("b", [KeyUse(KeyId("k1"), 2, 0), KeyUse(KeyId("k3"), 2, 0)])
    assert dict(exchange.take(["c"])) == {
        "c": (KeyUse(KeyId("k0"), 1, 0), KeyUse(KeyId("k1"), 3, 0))
    }


def steps(job: Coroutine[Any, Any, Any]) -> Iterator[None]:
    """Run a job; pause wherever others have their turn, and at its end."""
    while True:
        try:
            job.send(None)
        except StopIteration:
            yield
            return
        yield


def test_requests_have_their_turn_while_much_use_is_drawn() -> None:
    drawn: list[KeyUse] = []
    rows = [KeyUse(KeyId(f"k{n}"), 1, 0) for n in range(KEY_USE_ROWS_MAX)]
    before = 0
    for _ in steps(draw_in_slices(rows, drawn.append)):
        assert len(drawn) - before <= ROWS_PER_SLICE
        before = len(drawn)
    assert drawn == rows


class Routers:
    """Stands for the connections of routers; notes what each is sent."""

    def __init__(self, names: str, capabilities: frozenset[str]) -> None:
        self.sent: list[tuple[str, FleetKeyUse]] = []
        self.peers = [SimpleNamespace(name=name, capabilities=capabilities) for name in names]
        for peer in self.peers:
            peer.enqueue = partial(self.note, peer.name)

    def note(self, name: str, message: FleetKeyUse) -> None:
        self.sent.append((name, message))

    def routers(self) -> list[SimpleNamespace]:
        return self.peers


def test_a_scheduler_has_other_turns_between_the_routers_that_it_tells() -> None:
    exchange, peers = KeyUseExchange(), Routers("abcdef", frozenset({KEY_USE}))
    exchange.add("g", [KeyUse(KeyId(f"k{n:05}"), 1, 0) for n in range(KEY_USE_ROWS_MAX + 1)])
    before = 0
    for _ in steps(ShareKeyUse(exchange, cast(Any, peers)).run_once()):
        assert len(peers.sent) - before <= 1
        before = len(peers.sent)
    assert sum(len(message.rows) for _, message in peers.sent) == 6 * (KEY_USE_ROWS_MAX + 1)
    decoder = codec.decoder(FleetKeyUse)
    for _, message in peers.sent:
        assert codec.decode(codec.encode(message), decoder) == message
    old = Routers("a", frozenset())
    exchange.add("g", [KeyUse(ID, 1, 0)])
    assert [*steps(ShareKeyUse(exchange, cast(Any, old)).run_once())] == [None]
    assert old.sent == []


def test_an_outbox_keeps_one_row_for_each_key() -> None:
    outbox = KeyUseOutbox()
    assert outbox.take() is None
    outbox.add([KeyUse(ID, 1, 10)])
    outbox.add([KeyUse(ID, 2, -3)])
    message = outbox.take()
    assert message is not None and message.rows == (KeyUse(ID, 3, 7),)
    outbox.add([KeyUse(KeyId(f"k{n}"), 1, 1) for n in range(KEY_USE_ROWS_MAX + 5)])
    sizes = [len(part.rows) for part in (outbox.take(), outbox.take()) if part is not None]
    assert sizes == [KEY_USE_ROWS_MAX, 5]


@settings(max_examples=60, deadline=None)
@given(
    routers=st.integers(1, 5),
    wanted=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=300),
)
def test_a_key_gets_its_rate_and_at_most_a_burst_at_each_router(
    routers: int, wanted: list[tuple[int, int]]
) -> None:
    """Each step takes a second; what routers tell arrives two seconds later."""
    limiters = [KeyLimiter() for _ in range(routers)]
    exchange, under_way = KeyUseExchange(), [dict[str, tuple[KeyUse, ...]](), {}]
    admitted = 0
    for now_s, (router, count) in enumerate(wanted):
        limiter = limiters[router % routers]
        admitted += sum(is_admitted(limiter, float(now_s), 1) for _ in range(count))
        for number, own in enumerate(limiters):
            exchange.add(str(number), own.take_unshared())
        under_way.append(dict(exchange.take([str(number) for number in range(routers)])))
        for name, rows in under_way.pop(0).items():
            for row in rows:
                limiters[int(name)].draw_elsewhere(KEY, row, float(now_s), NOON)
        assert admitted <= now_s + 1 + 60 * routers
    # The bound does not grow: what was too much is owed.
    later = float(len(wanted) + 60 * routers)
    assert all(is_admitted(limiter, later, 1) for limiter in limiters)
