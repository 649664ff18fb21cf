"""Roles pinned to device classes: where replicas go, in which ratio, what is refused and why."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from isochrone.cli import serving
from isochrone.cli.context import CliContext
from isochrone.wire.ids import DeploymentId, DeviceId
from isochrone.wire.models.model import EngineSettings, ModelDimensions, PlacementPolicy
from isochrone.wire.peers.report import NodeDevice, ReplicaProfile
from scheduler.api.admin.deployments import roles_problem
from scheduler.decide.capacity.device_classes import is_named_by
from scheduler.decide.cluster import ClusterState, DemandRate, FleetNode, MeasuredProfile
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.whatif import explain_placement
from scheduler.decide.whatif.simulation import apply_plan
from tests.builders import GIB, a_cluster, a_deployment, a_model, a_node
from tests.unit.scheduler.test_pop_roles import tokens_in

READER = MeasuredProfile(
    model_id="m",
    device_class="h100-80g",
    profile=ReplicaProfile(prefill_tokens_per_s=2000, decode_tokens_per_s=100),
)
WRITER = MeasuredProfile(
    model_id="m",
    device_class="h200-141g",
    profile=ReplicaProfile(prefill_tokens_per_s=1000, decode_tokens_per_s=300),
)


def gpus(pop: str, device_class: str, count: int = 4) -> FleetNode:
    devices = tuple(
        NodeDevice(
            device_id=DeviceId(f"{device_class}-{number}"),
            device_class=device_class,
            memory_bytes=int(1.6 * GIB),
        )
        for number in range(count)
    )
    return a_node(f"{pop}-{device_class}", pop, devices=devices)


def pinned(
    demand: tuple[DemandRate, ...],
    roles: str = "prefill=1,decode=2",
    nodes: tuple[FleetNode, ...] = (),
    **policy: Any,
) -> ClusterState:
    both = gpus("ams", "h100-80g"), gpus("ams", "h200-141g"), gpus("sin", "h200-141g")
    pins: dict[str, Any] = {"prefill_devices": ("H100",), "decode_devices": ("h200-141g",)}
    fields = {"replicas_min": 0, "replicas_max": 8, **pins, **policy}
    return a_cluster(
        nodes=nodes or both,
        deployments=(a_deployment(roles=roles, **fields),),
        demand=demand,
        profiles=(READER, WRITER),
    )


def settled(cluster: ClusterState) -> ClusterState:
    for _ in range(60):
        plan = plan_deployments(cluster)
        if plan.is_empty:
            return cluster
        cluster = apply_plan(cluster, plan)
    raise AssertionError("the plans go on changing something")


def placed(cluster: ClusterState) -> list[tuple[str, str]]:
    return sorted((str(p.node_id), p.role.value) for p in cluster.placements)


def test_each_role_is_placed_on_its_devices_in_a_pop_that_has_both() -> None:
    # Demand in Singapore too, which has no device for prefill replicas.
    cluster = pinned((tokens_in("ams", 900.0, 400.0, 9.0), tokens_in("sin", 90.0, 40.0, 1.0)))
    found = placed(settled(cluster))
    assert {node for node, _ in found} == {"ams-h100-80g", "ams-h200-141g"}
    assert [role for node, role in found if node == "ams-h100-80g"] == ["prefill"]
    generating = [role for node, role in found if node == "ams-h200-141g"]
    assert sorted(generating) == ["decode"] * (len(generating) - 1) + ["unified"]
    assert len(generating) in (2, 3)


def test_auto_counts_each_role_on_its_own_class() -> None:
    # Reading takes 1.6 replicas of 2,000 tokens/s, output 1.3 of 300: as many of each.
    cluster = pinned((tokens_in("ams", 3200.0, 400.0, 9.0),), roles="auto")
    roles = [role for _, role in placed(settled(cluster))]
    assert (roles.count("prefill"), len(roles)) == (2, 4)
    # Hardly anything to read: nothing runs on the devices of prefill replicas.
    written = settled(pinned((tokens_in("ams", 50.0, 800.0, 9.0),), roles="auto"))
    assert {node for node, _ in placed(written)} == {"ams-h200-141g"}


def test_a_prefill_replica_without_work_ends_and_others_take_its_place() -> None:
    demand = (tokens_in("ams", 3200.0, 400.0, 9.0),)
    before = settled(pinned(demand, roles="auto"))
    evening = (tokens_in("ams", 50.0, 800.0, 9.0),)
    old = tuple(msgspec.structs.replace(p, age_s=10_000.0) for p in before.placements)
    cluster = msgspec.structs.replace(before, demand=evening, placements=old)
    ended: list[str] = []
    while not (plan := plan_deployments(cluster)).is_empty:
        # A class that is pinned to one role cannot take the other.
        assert not plan.role_changes
        ended += [ending.reason for ending in plan.endings]
        cluster = apply_plan(cluster, plan)
    assert ended == ["the prefill replicas of ams have too little to read"] * 2
    assert {role for _, role in placed(cluster)} == {"unified", "decode"}


def test_a_pop_without_a_free_prefill_device_says_so() -> None:
    cluster = pinned((tokens_in("ams", 900.0, 400.0, 9.0),))
    device = NodeDevice(device_id=DeviceId("g"), device_class="h100-80g", memory_bytes=GIB // 2)
    small = msgspec.structs.replace(cluster.nodes[0], devices=(device,))
    cluster = msgspec.structs.replace(cluster, nodes=(small, *cluster.nodes[1:]))
    plan = plan_deployments(settled(cluster))
    assert [unmet.reason.split(":")[0] for unmet in plan.unmet] == [
        "cannot place a replica (ams has too few prefill replicas)"
    ]
    # Those that generate can read, too: the demand is served meanwhile.
    assert {role for _, role in placed(settled(cluster))} == {"unified", "decode"}


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        (
            {"prefill_devices": ("B200",)},
            "cannot satisfy the policy: prefill_devices ['B200'] names no device here: the classes"
            " are h100-80g, h200-141g",
        ),
        (
            {"allow": ("sin",)},
            "cannot satisfy the policy: no PoP that it may use has devices for both roles: prefill"
            " ['H100'] and decode ['h200-141g']",
        ),
    ],
)
def test_a_fleet_without_the_devices_is_named_as_the_reason(
    pins: dict[str, Any], reason: str
) -> None:
    plan = plan_deployments(pinned((tokens_in("ams", 900.0, 400.0, 9.0),), **pins))
    assert (plan.starts, [unmet.reason for unmet in plan.unmet][:1]) == ((), [reason])


def test_explain_says_why_a_node_takes_no_replica() -> None:
    nodes = gpus("ams", "h100-80g"), gpus("sin", "h200-141g"), gpus("ams", "l4-24g")
    explanation = explain_placement(pinned((), nodes=nodes), DeploymentId("d"))
    assert explanation is not None
    assert {row.node_id: row.reason for row in explanation.elsewhere} == {
        "ams-h100-80g": "ams has no device that decode_devices names, and both roles are in one"
        " PoP",
        "sin-h200-141g": "sin has no device that prefill_devices names, and both roles are in one"
        " PoP",
        "ams-l4-24g": "its l4-24g is neither in prefill_devices nor in decode_devices",
    }


def test_devices_with_other_kv_types_are_refused() -> None:
    shape = ModelDimensions(layers=4, hidden_size=64, heads=4, kv_heads=4, head_size=16)
    cluster = pinned(
        (), nodes=(gpus("ams", "cpu"), gpus("ams", "h200-141g")), prefill_devices=("cpu",)
    )
    model = msgspec.structs.replace(a_model(), shape=shape)

    def reasons(**options: str) -> list[str]:
        deployment = msgspec.structs.replace(
            cluster.deployments[0], engine=EngineSettings(options=options)
        )
        plan = plan_deployments(
            msgspec.structs.replace(cluster, models=(model,), deployments=(deployment,))
        )
        return [unmet.reason for unmet in plan.unmet if "KV" in unmet.reason]

    assert [reason.split(":")[0] for reason in reasons()] == [
        "cannot send KV from cpu to h200-141g"
    ]
    assert reasons(kv_dtype="bf16") == []


def test_a_name_is_a_class_or_a_chip() -> None:
    assert is_named_by("h100-80g", ["H100"])
    assert is_named_by("h100-80g", ["l4", "h100-80g"])
    assert not is_named_by("h100-80g", ["h100-94g", "H200"])
    assert not is_named_by("h100-80g", [])
    # As devices report themselves.
    assert is_named_by("h100-86g", ["h100-80g"])
    assert is_named_by("a100-sxm4-80gb-86g", ["a100-80g"])
    assert not is_named_by("a100-pcie-40gb-43g", ["a100-80g"])
    assert not is_named_by("h100-nvl-101g", ["h100-80g"])
    assert is_named_by("cpu", ["CPU"])


def test_pins_need_roles() -> None:
    policy = PlacementPolicy(prefill_devices=("H100",))
    assert roles_problem(EngineSettings(), policy).startswith("prefill_devices and decode_devices")
    split = msgspec.structs.replace(policy, roles="auto")
    assert roles_problem(EngineSettings(), split) == ""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"prefill_devices": ["H 100"]}, PlacementPolicy)


class Api:
    """An admin API with one deployment; it keeps the policies that it is given."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {"deployment_id": "d", "etag": 1, "engine": {}, "policy": {}}
        self.policies: list[dict[str, Any]] = []

    def ask(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if method == "PUT":
            self.policies.append(body["policy"])
            self.row["policy"] = body["policy"]
        return self.row

    def list(self, path: str, query: Any = None) -> list[dict[str, Any]]:
        return [self.row]


def test_the_command_line_sets_keeps_and_lifts_pins() -> None:
    api: Any = Api()
    for options in (
        ["--roles", "auto", "--prefill-devices", "H100", "--prefill-devices", "l40s-48g"],
        ["--decode-devices", "H200"],
        ["--prefill-devices", ""],
    ):
        result = CliRunner().invoke(serving.deploy, ["d", *options], obj=CliContext(api, "json"))
        assert result.exit_code == 0, result.output
    pins = [(p.get("prefill_devices"), p.get("decode_devices")) for p in api.policies]
    both = ["H100", "l40s-48g"]
    assert pins == [(both, None), (both, ["H200"]), ([], ["H200"])]
