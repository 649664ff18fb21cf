"""A delta turns one table into the next, whatever changed."""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire import codec
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
    TenantId,
)
from isochrone.wire.peers import routes
from isochrone.wire.peers.control import ToRouter
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyEntry,
    KeyTable,
    Pop,
    Route,
    RouteTable,
    apply_delta,
    diff,
)

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


Row = TypeVar("Row")


def pop(name: str, latitude: int) -> Pop:
    return Pop(
        pop=PopId(name * 3), city=name, country="NL", latitude=float(latitude), longitude=0.0
    )


def route(name: str, load: int) -> Route:
    return Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        version=1,
        node_id=NodeId("n"),
        pop=PopId("ams"),
        address="http://127.0.0.1:1",
        tokens_in_flight_max=load,
    )


def entry(name: str, context: int) -> DeploymentEntry:
    return DeploymentEntry(
        deployment_id=DeploymentId(name),
        name=name,
        model_id=ModelId("m"),
        context_tokens=context,
    )


def key(name: str, expires: int) -> KeyEntry:
    return KeyEntry(
        key_id=KeyId(name),
        secret_sha256="0" * 64,
        tenant_id=TenantId("t"),
        expires_at=float(expires),
    )


@st.composite
def tables(draw: st.DrawFn, generation: int) -> RouteTable:
    def rows(make: Callable[[str, int], Row]) -> tuple[Row, ...]:
        chosen = draw(st.dictionaries(NAMES, st.integers(0, 3)))
        return tuple(make(name, value) for name, value in sorted(chosen.items()))

    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(generation),
        epoch=Epoch(generation),
        pops=rows(pop),
        deployments=rows(entry),
        routes=rows(route),
        keys=KeyTable.of(rows(key)),
        keys_revoked=rows(lambda name, _: KeyId(f"x-{name}")),
    )


@settings(deadline=None, max_examples=100)
@given(old=tables(1), new=tables(2))
def test_a_delta_turns_the_old_table_into_the_new(old: RouteTable, new: RouteTable) -> None:
    delta = diff(old, new)
    carried = codec.decode(codec.encode(delta), codec.decoder(ToRouter))
    # Few changes are merged where they belong, many are sorted with the rest.
    for share in (0.0, 100.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "MANY_CHANGES_SHARE", share)
            assert apply_delta(old, carried) == new


@settings(deadline=None, max_examples=50)
@given(table=tables(1))
def test_no_change_is_an_empty_delta(table: RouteTable) -> None:
    delta = diff(table, table)
    assert not (delta.pops_set or delta.routes_set or delta.keys_set or delta.deployments_set)
    assert not (delta.pops_gone or delta.routes_gone or delta.keys_gone or delta.deployments_gone)
