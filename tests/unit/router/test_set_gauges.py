"""Gauges are set in slices, between which requests have their turn."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from router.loops.set_gauges import REPLICAS_PER_SLICE, GaugeSetter


class AnyGauge:
    """A gauge, with or without labels."""

    value = 0.0

    def labels(self, *values: str) -> "AnyGauge":
        return AnyGauge()

    def set(self, value: float) -> None:
        self.value = value


def test_the_replicas_of_a_router_that_is_cut_off_are_counted_in_slices() -> None:
    ejected = dict.fromkeys(map(str, range(3 * REPLICAS_PER_SLICE + 1)), 9.0)
    slices: list[int] = []

    def deployments_of(replica_ids: list[str]) -> list[str]:
        slices.append(len(replica_ids))
        return ["d" if int(replica_id) % 2 else "e" for replica_id in replica_ids]

    totals = SimpleNamespace(prefill_tokens=0, decode_tokens=0, requests=0)
    fleet: Any = SimpleNamespace(
        clock=lambda: 0.0,
        in_flight=SimpleNamespace(totals=lambda: totals),
        health=SimpleNamespace(unhealthy=ejected.keys, ejected_until_s=lambda now_s: ejected),
        deployments_of=deployments_of,
        panicking_deployments=dict,
    )
    names = "connected table_age in_flight open_requests waiting waiting_bytes ejected panics"
    metrics: Any = SimpleNamespace(**{name: AnyGauge() for name in names.split()})
    follower: Any = SimpleNamespace(age_s=lambda *, is_connected: 0.0)
    waiting: Any = SimpleNamespace(depth=0, bytes=0)
    setter = GaugeSetter(
        fleet=fleet,
        follower=follower,
        waiting=waiting,
        metrics=metrics,
        is_connected=lambda: True,
    )
    run, turns = setter.run_once(), 0
    with suppress(StopIteration):
        while True:
            run.send(None)
            turns += 1
    assert turns == 4
    assert max(slices) == REPLICAS_PER_SLICE
    half = len(ejected) // 2
    assert metrics.panics.value == {"e": half + 1, "d": half}
