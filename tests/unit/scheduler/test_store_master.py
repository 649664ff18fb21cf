"""The node that runs the master of a PoP's store of KV."""

import msgspec
import pytest

from isochrone.wire.ids import NodeId, PopId, ReplicaId
from isochrone.wire.models.model import EngineSettings, PlacementPolicy
from scheduler.api.admin.deployments import roles_problem
from scheduler.decide.capacity.replica_capacity import overhead_bytes
from scheduler.decide.membership import StoreMember, store_masters
from tests.builders import GIB, a_model

EMBEDDED_IN_STORE = EngineSettings(
    driver="embedded", share_kv=True, options={"kv_store_bytes": str(GIB)}
)


def a_member(name: str, at: float, *, is_away: bool = False, pop: str = "ams") -> StoreMember:
    address = f"https://{name}"
    names = (ReplicaId(f"r-{name}"), PopId(pop), NodeId(name), address)
    return StoreMember(*names, placed_at=at, is_away=is_away)


def place(*members: StoreMember) -> dict[str, str]:
    return {pop: found.node_id for pop, found in store_masters(members).items()}


def test_the_master_stays_with_the_first_replica_while_others_come_and_go() -> None:
    first, second = a_member("n2", 1.0), a_member("n3", 2.0)
    assert place(first, second) == {"ams": "n2"}
    assert place(a_member("n1", 3.0), second, first) == {"ams": "n2"}
    assert store_masters([first])[PopId("ams")].address == "https://n2"


def test_the_master_moves_from_a_node_that_is_away_and_does_not_move_back() -> None:
    second = a_member("n3", 2.0)
    assert place(a_member("n2", 1.0, is_away=True), second) == {"ams": "n3"}
    # It comes back with a replica that was placed later.
    assert place(a_member("n2", 9.0), second) == {"ams": "n3"}


def test_each_pop_has_a_master_of_its_own_or_none() -> None:
    members = (a_member("n1", 1.0), a_member("n9", 0.5, pop="sin"))
    assert place(*members) == {"ams": "n1", "sin": "n9"}
    assert place(a_member("n1", 1.0, is_away=True)) == {}
    assert place() == {}


def test_replicas_placed_at_once_are_ordered_by_name() -> None:
    assert place(a_member("n2", 1.0), a_member("n1", 1.0)) == {"ams": "n1"}


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineSettings(driver="vllm", share_kv=True), ""),
        (EngineSettings(driver="embedded", share_kv=True, nodes=2, devices=2), ""),
        (EMBEDDED_IN_STORE, ""),
        (
            msgspec.structs.replace(EMBEDDED_IN_STORE, nodes=2, devices=2),
            "share_kv of embedded with kv_store_bytes needs replicas of one node each",
        ),
        (
            msgspec.structs.replace(EMBEDDED_IN_STORE, share_kv=False),
            "kv_store_bytes is for replicas that share KV: add share_kv",
        ),
        (EngineSettings(driver="llama_cpp", share_kv=True), "share_kv needs an engine that sends"),
        (
            EngineSettings(driver="vllm", share_kv=True, options={"kv_connector": "nixl"}),
            "share_kv makes a kv_transfer_config of its own (Mooncake Store): leave kv_connector",
        ),
        (
            EngineSettings(driver="vllm", share_kv=True, options={"kv_transfer_config": "{}"}),
            "share_kv makes a kv_transfer_config of its own (Mooncake Store): leave kv_transfer",
        ),
        (
            EngineSettings(driver="vllm", options={"kv_store_bytes": "1"}),
            "kv_store_bytes is for replicas that share KV: add share_kv",
        ),
        (
            EngineSettings(driver="vllm", share_kv=True, nodes=2, devices=2),
            "share_kv of vllm needs replicas of one node each",
        ),
    ],
)
def test_a_deployment_that_cannot_share_kv_is_refused(engine: EngineSettings, reason: str) -> None:
    found = roles_problem(engine, PlacementPolicy())
    assert found.startswith(reason) if reason else found == ""


def test_a_vllm_that_shares_kv_has_no_roles() -> None:
    shared = EngineSettings(driver="vllm", share_kv=True)
    reason = roles_problem(shared, PlacementPolicy(roles="prefill=1,decode=1"))
    assert reason == "share_kv of vllm needs replicas without roles: set roles to unified"
    reason = roles_problem(EMBEDDED_IN_STORE, PlacementPolicy(roles="prefill=1,decode=1"))
    expected = "share_kv of embedded with kv_store_bytes needs replicas without roles"
    assert reason == f"{expected}: set roles to unified"


def test_the_memory_that_a_replica_gives_to_the_store_is_planned() -> None:
    model = a_model()
    alone = overhead_bytes(model, EngineSettings(driver="vllm"))
    shared = overhead_bytes(model, EngineSettings(driver="vllm", share_kv=True))
    more = EngineSettings(driver="vllm", share_kv=True, options={"kv_store_bytes": str(3 * GIB)})
    assert shared - alone == GIB + GIB // 8
    assert overhead_bytes(model, more) - alone == 3 * GIB + GIB // 8
    embedded = EngineSettings(driver="embedded")
    assert overhead_bytes(model, EngineSettings(driver="embedded", share_kv=True)) == (
        overhead_bytes(model, embedded)
    )
    given = overhead_bytes(model, EMBEDDED_IN_STORE) - overhead_bytes(model, embedded)
    assert given == GIB + GIB // 8
