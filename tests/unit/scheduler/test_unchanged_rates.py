"""Small drifts of rates do not change the route table; every other change does."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import ClusterId, DeploymentId, Epoch, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import Route, RouteTable, apply_delta, diff
from scheduler.decide.routing import keep_unchanged_rates


def a_route(name: str = "r1", **fields: Any) -> Route:
    defaults: dict[str, Any] = {
        "deployment_id": DeploymentId("d1"),
        "version": 1,
        "node_id": NodeId("n1"),
        "pop": PopId("ams"),
        "address": "http://a",
        "prefill_tokens_per_s": 1000.0,
        "decode_tokens_per_s": 100.0,
    }
    return Route(replica_id=ReplicaId(name), **{**defaults, **fields})


def a_table(*routes: Route, generation: int = 0, epoch: int = 1) -> RouteTable:
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(generation),
        epoch=Epoch(epoch),
        routes=routes,
    )


@pytest.mark.parametrize(
    ("now", "is_sent"),
    [
        ({}, False),
        ({"prefill_tokens_per_s": 1090.0, "decode_tokens_per_s": 91.0}, False),
        ({"prefill_tokens_per_s": 1110.0}, True),
        ({"decode_tokens_per_s": 89.0}, True),
        ({"decode_tokens_per_s": 0.0}, True),
        ({"address": "http://b"}, True),
        ({"version": 2, "prefill_tokens_per_s": 1001.0}, True),
    ],
)
def test_a_rate_change_of_a_tenth_keeps_the_old_rate(now: dict[str, Any], is_sent: bool) -> None:
    sent = a_table(a_route(), generation=7)
    settled = keep_unchanged_rates(sent, a_table(a_route(**now)))
    assert (settled != sent) is is_sent
    assert settled.generation == 7


def test_the_first_measured_rate_is_sent() -> None:
    sent = a_table(a_route(prefill_tokens_per_s=0.0))
    assert keep_unchanged_rates(sent, a_table(a_route())) != sent


def test_slow_drift_is_sent_once_it_adds_up() -> None:
    sent = a_table(a_route())
    for step in range(1, 9):
        told_again = keep_unchanged_rates(
            sent, a_table(a_route(prefill_tokens_per_s=1000.0 + 15.0 * step))
        )
        assert (told_again != sent) is (step >= 7)


def test_a_new_term_sends_all_rates_again() -> None:
    sent = a_table(a_route(), generation=7)
    new = a_table(a_route(prefill_tokens_per_s=1001.0), epoch=2)
    assert keep_unchanged_rates(sent, new) == new


RATES = st.floats(0, 1e6)


@settings(deadline=None, max_examples=60)
@given(
    before=st.dictionaries(st.sampled_from("abcdef"), RATES),
    after=st.dictionaries(st.sampled_from("abcdef"), RATES),
)
def test_rates_that_routers_hold_stay_close_to_measured_ones(
    before: dict[str, float], after: dict[str, float]
) -> None:
    def table(rates: dict[str, float]) -> RouteTable:
        return a_table(
            *(a_route(n, prefill_tokens_per_s=rate) for n, rate in sorted(rates.items()))
        )

    sent, new = table(before), table(after)
    settled = keep_unchanged_rates(sent, new)
    assert [route.replica_id for route in settled.routes] == sorted(after)
    for route, real in zip(settled.routes, new.routes, strict=True):
        assert abs(route.prefill_tokens_per_s - real.prefill_tokens_per_s) <= max(
            0.1 * route.prefill_tokens_per_s, 0.0
        )
    delta = diff(sent, settled)
    assert len(delta.routes_set) <= len(after)
    assert apply_delta(sent, delta) == msgspec.structs.replace(settled, generation=sent.generation)
