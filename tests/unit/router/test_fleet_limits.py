"""Routers draw from a key's limits what it has used at the others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.client_keys.key_use import KEY_USE_ROWS_MAX, KeyUse
from isochrone.wire.ids import KeyId
from router.decide.admission.limits import KeyLimiter, LimitExceeded
from router.sharing.key_use_sharing import KeyUseOutbox
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
    assert limiter.take_untold() == [KeyUse(ID, 2, 160)]
    assert limiter.take_untold() == []
    first.settle(30, 1.0)
    assert limiter.take_untold() == [KeyUse(ID, 0, -70)]
    assert limiter.take_untold() == []
    is_admitted(limiter, 2.0)
    limiter.forget([ID])
    assert limiter.take_untold() == []


@pytest.mark.parametrize("processes", [1, 4])
def test_use_elsewhere_is_drawn_by_the_share_of_each_process(processes: int) -> None:
    limiter = KeyLimiter(processes)
    limiter.draw_elsewhere(KEY, KeyUse(ID, 60, 0), 0.0, NOON)
    assert not is_admitted(limiter, 0.0)
    assert is_admitted(limiter, 1.0 * processes)
    assert limiter.take_untold() == [KeyUse(ID, 1, 10)]
    tokens = KeyLimiter(processes)
    tokens.draw_elsewhere(KEY, KeyUse(ID, 0, 6000), 0.0, NOON)
    assert not is_admitted(tokens, 0.0)
    tokens.draw_elsewhere(KEY, KeyUse(ID, 0, -6000), 0.0, NOON)
    assert is_admitted(tokens, 0.0)


def test_the_exchange_tells_each_router_of_the_others() -> None:
    exchange = KeyUseExchange()
    other = KeyId("o")
    exchange.add("a", [KeyUse(ID, 2, 20), KeyUse(other, 1, 5)])
    exchange.add("b", [KeyUse(ID, 3, 30)])
    exchange.add("b", [KeyUse(ID, 1, -5)])
    told = exchange.take(["a", "b", "c"])
    assert told == {
        "a": [KeyUse(ID, 4, 25)],
        "b": [KeyUse(ID, 2, 20), KeyUse(other, 1, 5)],
        "c": [KeyUse(ID, 6, 45), KeyUse(other, 1, 5)],
    }
    assert exchange.take(["a", "b"]) == {}


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
    exchange, under_way = KeyUseExchange(), [dict[str, list[KeyUse]](), {}]
    admitted = 0
    for now_s, (router, count) in enumerate(wanted):
        limiter = limiters[router % routers]
        admitted += sum(is_admitted(limiter, float(now_s), 1) for _ in range(count))
        for number, own in enumerate(limiters):
            exchange.add(str(number), own.take_untold())
        under_way.append(exchange.take([str(number) for number in range(routers)]))
        for name, rows in under_way.pop(0).items():
            for row in rows:
                limiters[int(name)].draw_elsewhere(KEY, row, float(now_s), NOON)
        assert admitted <= now_s + 1 + 60 * routers
    # The bound does not grow: what was too much is owed.
    later = float(len(wanted) + 60 * routers)
    assert all(is_admitted(limiter, later, 1) for limiter in limiters)
