"""Rates that drift are not news; whatever else changes is."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import ClusterId, DeploymentId, Epoch, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.routes import Route, RouteTable, apply_delta, diff
from scheduler.decide.routing.route_table import keep_unchanged_rates


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
    ("now", "is_news"),
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
def test_a_tenth_is_no_news(now: dict[str, Any], is_news: bool) -> None:
    told = a_table(a_route(), generation=7)
    settled = keep_unchanged_rates(told, a_table(a_route(**now)))
    assert (settled != told) is is_news
    assert settled.generation == 7


def test_the_first_rate_measured_is_news() -> None:
    told = a_table(a_route(prefill_tokens_per_s=0.0))
    assert keep_unchanged_rates(told, a_table(a_route())) != told


def test_a_drift_adds_up_until_it_is_told() -> None:
    told = a_table(a_route())
    for step in range(1, 9):
        told_again = keep_unchanged_rates(
            told, a_table(a_route(prefill_tokens_per_s=1000.0 + 15.0 * step))
        )
        assert (told_again != told) is (step >= 7)


def test_a_new_term_tells_everything_anew() -> None:
    told = a_table(a_route(), generation=7)
    new = a_table(a_route(prefill_tokens_per_s=1001.0), epoch=2)
    assert keep_unchanged_rates(told, new) == new


RATES = st.floats(0, 1e6)


@settings(deadline=None, max_examples=60)
@given(
    before=st.dictionaries(st.sampled_from("abcdef"), RATES),
    after=st.dictionaries(st.sampled_from("abcdef"), RATES),
)
def test_what_routers_hold_is_never_far_from_what_is(
    before: dict[str, float], after: dict[str, float]
) -> None:
    def table(rates: dict[str, float]) -> RouteTable:
        return a_table(
            *(a_route(n, prefill_tokens_per_s=rate) for n, rate in sorted(rates.items()))
        )

    told, new = table(before), table(after)
    settled = keep_unchanged_rates(told, new)
    assert [route.replica_id for route in settled.routes] == sorted(after)
    for route, real in zip(settled.routes, new.routes, strict=True):
        assert abs(route.prefill_tokens_per_s - real.prefill_tokens_per_s) <= max(
            0.1 * route.prefill_tokens_per_s, 0.0
        )
    delta = diff(told, settled)
    assert len(delta.routes_set) <= len(after)
    assert apply_delta(told, delta) == msgspec.structs.replace(settled, generation=told.generation)
