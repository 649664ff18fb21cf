"""Builders of values with defaults, for tests."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from isochrone.service.trust.identity import Certificate, CertificateSubject
from isochrone.wire.ids import (
    BootId,
    ClusterId,
    DeploymentId,
    DeviceId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import (
    Artifact,
    ArtifactFile,
    CatalogModel,
    Deployment,
    EngineSettings,
    PlacementPolicy,
)
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import NodeDevice, ReplicaReport, ReplicaState, Report
from isochrone.wire.peers.routes import Pop
from scheduler.decide.cluster import ClusterState, FleetNode, Placement

GIB = 1024**3
NOW = datetime(2026, 1, 1, tzinfo=UTC)

PLACES = {
    "ams": ("NL", 52.3, 4.8),
    "iad": ("US", 38.9, -77.5),
    "sin": ("SG", 1.35, 104.0),
    "fra": ("DE", 50.0, 8.6),
    "gru": ("BR", -23.4, -46.5),
}


def a_pop(pop: str) -> Pop:
    country, latitude, longitude = PLACES[pop]
    return Pop(pop=PopId(pop), city=pop, country=country, latitude=latitude, longitude=longitude)


def a_certificate(name: str) -> Certificate:
    peer = CertificateSubject(PeerRole.AGENT, name, PopId("ams"))
    return Certificate(peer, "5e71a1", NOW, NOW + timedelta(days=90))


def an_artifact(content: bytes = b"weights") -> Artifact:
    file = ArtifactFile(
        path="m.gguf", size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    return Artifact(source="file:/nowhere", files=(file,), digest=manifest_digest([file]))


def a_model(name: str = "m", gib: float = 1.0) -> CatalogModel:
    return CatalogModel(
        model_id=name,
        architecture="LlamaForCausalLM",
        artifact=an_artifact(name.encode()),
        context_tokens=4096,
        weights_bytes=int(gib * GIB),
    )


def a_deployment(name: str = "d", model: str = "m", **fields: Any) -> Deployment:
    engine = fields.pop("engine", EngineSettings(driver="mock", kv_memory_bytes=0))
    version = fields.pop("version", 1)
    return Deployment(
        deployment_id=DeploymentId(name),
        name=name,
        model_id=ModelId(model),
        version=version,
        engine=engine,
        policy=PlacementPolicy(**fields),
    )


def a_device(gib: float = 8.0, name: str = "cpu", **fields: Any) -> NodeDevice:
    size = int(gib * GIB)
    return NodeDevice(
        device_id=DeviceId(name),
        device_class="cpu",
        memory_bytes=size,
        **fields,
    )


def a_node(name: str, pop: str, gib: float = 8.0, **fields: Any) -> FleetNode:
    devices = fields.pop("devices", (a_device(gib),))
    return FleetNode(
        node_id=NodeId(name),
        pop=PopId(pop),
        address=f"http://{name}",
        devices=devices,
        **fields,
    )


def a_placement(
    name: str, node: str, deployment: str = "d", state: str = "warm", **fields: Any
) -> Placement:
    defaults: dict[str, Any] = {
        "version": 1,
        "device_ids": (DeviceId("cpu"),),
        "memory_bytes": int(1.25 * GIB),
        "age_s": 10_000.0,
        "state_age_s": 10_000.0,
    }
    return Placement(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId(deployment),
        node_id=NodeId(node),
        state=ReplicaState(state),
        **{**defaults, **fields},
    )


def a_cluster(**fields: Any) -> ClusterState:
    defaults: dict[str, Any] = {
        "cluster_id": ClusterId("c1"),
        "generation": Generation(7),
        "acting_for_s": 1000.0,
        "pops": tuple(a_pop(pop) for pop in sorted(PLACES)),
        "models": (a_model(),),
        "deployments": (a_deployment(),),
    }
    return ClusterState(**{**defaults, **fields})


def a_spec(replica_id: str = "r1", **fields: Any) -> ReplicaSpec:
    defaults: dict[str, Any] = {
        "deployment_id": DeploymentId("d"),
        "version": 1,
        "name": "d",
        "model_id": ModelId("m"),
        "artifact": an_artifact(),
        "context_tokens": 4096,
        "engine": EngineSettings(driver="mock", kv_memory_bytes=0),
        "device_ids": (DeviceId("cpu"),),
        "memory_bytes": GIB,
    }
    return ReplicaSpec(replica_id=ReplicaId(replica_id), **{**defaults, **fields})


def a_report(node: str = "n1", seq: int = 1, **fields: Any) -> Report:
    defaults: dict[str, Any] = {
        "boot_id": BootId("boot-1"),
        "generation": Generation(1),
        "epoch": Epoch(1),
        "address": "http://127.0.0.1:1",
        "devices": (a_device(),),
    }
    return Report(node_id=NodeId(node), seq=seq, **{**defaults, **fields})


def believed(node_id: NodeId, spec: ReplicaSpec) -> bool:
    """Accept every seal."""
    return True


def a_replica_report(spec: ReplicaSpec, state: str = "warm") -> ReplicaReport:
    return ReplicaReport(spec=spec, state=ReplicaState(state))
