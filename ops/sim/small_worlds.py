"""Small worlds, drawn by seed, that a MILP can solve exactly, to measure the planner against.

Each has four to seven PoPs of 24 real cities, one to three nodes per PoP with one to four devices
of mixed classes, three to six deployments of models from 1 to 150 GB with varied policies, and
demand of 0.2 to 1.5 times what the fleet can serve.
"""

from typing import Final

import numpy as np

from isochrone.wire.ids import ClusterId, DeploymentId, DeviceId, Generation, ModelId, NodeId, PopId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import (
    Artifact,
    ArtifactFile,
    CatalogModel,
    Deployment,
    EngineSettings,
    PlacementPolicy,
)
from isochrone.wire.peers.report import NodeDevice, ReplicaProfile
from isochrone.wire.peers.routes import Pop
from scheduler.decide.capacity.device_classes import CLASSES, GIB
from scheduler.decide.capacity.replica_capacity import overhead_bytes
from scheduler.decide.cluster import ClusterState, DemandRate, FleetNode, MeasuredProfile

CITIES: Final = (
    ("ams", "NL", 52.3, 4.8),
    ("fra", "DE", 50.0, 8.6),
    ("lhr", "GB", 51.5, -0.5),
    ("mad", "ES", 40.5, -3.6),
    ("waw", "PL", 52.2, 21.0),
    ("ist", "TR", 41.3, 28.7),
    ("iad", "US", 38.9, -77.5),
    ("ord", "US", 42.0, -87.9),
    ("dfw", "US", 32.9, -97.0),
    ("lax", "US", 33.9, -118.4),
    ("sea", "US", 47.4, -122.3),
    ("mex", "MX", 19.4, -99.1),
    ("gru", "BR", -23.4, -46.5),
    ("scl", "CL", -33.4, -70.8),
    ("jnb", "ZA", -26.1, 28.2),
    ("los", "NG", 6.6, 3.3),
    ("cai", "EG", 30.1, 31.4),
    ("dxb", "AE", 25.3, 55.4),
    ("bom", "IN", 19.1, 72.9),
    ("sin", "SG", 1.35, 104.0),
    ("hkg", "HK", 22.3, 113.9),
    ("nrt", "JP", 35.8, 140.4),
    ("syd", "AU", -33.9, 151.2),
    ("icn", "KR", 37.5, 126.4),
)
DEVICE_CLASSES: Final = ("h100-80g", "l40s-48g", "l4-24g")
SPEED: Final = {"h100-80g": 1.0, "l40s-48g": 0.35, "l4-24g": 0.12}

WEIGHTS_GB: Final = (1, 4, 8, 16, 35, 70, 150)
UNIT_TOKENS_PER_S: Final = 40_000.0
"""Tokens/s that a 1 GB model decodes on the fastest class; larger models are slower by size."""


def small_world(seed: int) -> ClusterState:
    """Return the small world of a seed; it is the same on every machine."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(CITIES), size=int(rng.integers(4, 8)), replace=False)
    pops = tuple(
        Pop(pop=PopId(name), city=name, country=country, latitude=lat, longitude=lon)
        for name, country, lat, lon in sorted(CITIES[int(i)] for i in chosen)
    )
    nodes = tuple(_node(rng, pop, number) for pop in pops for number in range(rng.integers(1, 4)))
    models, deployments, profiles = _deployments(rng, pops)
    return ClusterState(
        cluster_id=ClusterId("small"),
        generation=Generation(1),
        acting_for_s=1e6,
        pops=pops,
        nodes=nodes,
        models=models,
        deployments=deployments,
        demand=_demand(rng, pops, nodes, deployments, profiles),
        profiles=profiles,
    )


def a_model(name: str, weights_gb: float) -> CatalogModel:
    """Return a catalogue entry of a given size."""
    size = int(weights_gb * 1e9)
    file = ArtifactFile(path="model.safetensors", size_bytes=size, sha256=f"{hash_of(name):064x}")
    artifact = Artifact(source="file:/models", files=(file,), digest=manifest_digest([file]))
    return CatalogModel(
        model_id=name,
        architecture="LlamaForCausalLM",
        artifact=artifact,
        context_tokens=32_768,
        weights_bytes=size,
        kv_bytes_per_token=100_000,
    )


def hash_of(name: str) -> int:
    """Return a number that depends on a name only, unlike hash()."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(name))


def devices_for(model: CatalogModel, kv_memory_bytes: int, memory_bytes: int) -> int:
    """Return the fewest devices (1, 2, 4 or 8) of a size that hold a replica, or 16."""
    for count in (1, 2, 4, 8):
        if (
            model.weights_bytes / count
            + kv_memory_bytes
            + overhead_bytes(model, EngineSettings(driver="vllm"))
            <= memory_bytes
        ):
            return count
    return 16


def speed_profile(weights_gb: float, devices: int, speed: float) -> ReplicaProfile:
    """Return the measured rates of a replica: bandwidth over size, less the cost of splitting."""
    decode = UNIT_TOKENS_PER_S * speed * devices**0.85 / (weights_gb + 4.0)
    return ReplicaProfile(
        load_s=10.0, prefill_tokens_per_s=12.0 * decode, decode_tokens_per_s=decode
    )


def _node(rng: np.random.Generator, pop: Pop, number: int) -> FleetNode:
    kind = DEVICE_CLASSES[int(rng.choice(3, p=[0.4, 0.3, 0.3]))]
    return a_node(pop, number, kind, int(rng.choice([1, 2, 4])))


def a_node(pop: Pop, number: int, kind: str, devices: int) -> FleetNode:
    """Return a node with devices of one class; 95 % of their memory is usable."""
    memory = int(CLASSES[kind].memory_bytes * 0.95)
    return FleetNode(
        node_id=NodeId(f"{pop.pop}-{number}"),
        pop=pop.pop,
        address=f"http://{pop.pop}-{number}",
        devices=tuple(
            NodeDevice(
                device_id=DeviceId(f"gpu{index}"),
                device_class=kind,
                memory_bytes=memory,
            )
            for index in range(devices)
        ),
    )


def _deployments(
    rng: np.random.Generator, pops: tuple[Pop, ...]
) -> tuple[tuple[CatalogModel, ...], tuple[Deployment, ...], tuple[MeasuredProfile, ...]]:
    models, deployments, profiles = [], [], []
    largest = int(CLASSES["h100-80g"].memory_bytes * 0.95)
    for number in range(int(rng.integers(3, 7))):
        weights_gb = float(WEIGHTS_GB[int(rng.integers(0, len(WEIGHTS_GB)))])
        model = a_model(f"m{number}", weights_gb)
        kv = int(GIB * rng.choice([2, 4, 8]))
        count = devices_for(model, kv, largest)
        models.append(model)
        replicas_min = int(rng.choice([0, 0, 1, 2]))
        deployments.append(
            Deployment(
                deployment_id=DeploymentId(f"d{number}"),
                name=f"d{number}",
                model_id=ModelId(model.model_id),
                engine=EngineSettings(driver="vllm", kv_memory_bytes=kv, devices=count),
                policy=PlacementPolicy(
                    replicas_min=replicas_min,
                    replicas_max=int(rng.choice([max(1, replicas_min), 3, 12])),
                    keep_warm=(pops[0].pop,) if rng.random() < 0.15 else (),
                    deny=(pops[-1].country,) if rng.random() < 0.2 else (),
                    priority=int(rng.choice([40, 50, 50, 50, 60])),
                ),
            )
        )
        profiles += [
            MeasuredProfile(
                model_id=model.model_id,
                device_class=kind,
                profile=speed_profile(weights_gb, count, SPEED[kind]),
            )
            for kind in DEVICE_CLASSES
        ]
    return tuple(models), tuple(deployments), tuple(profiles)


def _demand(
    rng: np.random.Generator,
    pops: tuple[Pop, ...],
    nodes: tuple[FleetNode, ...],
    deployments: tuple[Deployment, ...],
    profiles: tuple[MeasuredProfile, ...],
) -> tuple[DemandRate, ...]:
    """Draw demand: popularity falls with rank, and each city has its own preferences."""
    devices = sum(len(node.devices) for node in nodes)
    fill = float(rng.uniform(0.2, 1.5))
    size = rng.lognormal(0.0, 0.7, len(pops))
    rank = 1.0 / np.arange(1, len(deployments) + 1)
    rng.shuffle(rank)
    rows = []
    for deployment, popularity in zip(deployments, rank / rank.sum(), strict=True):
        best = max(
            row.profile.decode_tokens_per_s
            for row in profiles
            if row.model_id == deployment.model_id
        )
        share = size * rng.lognormal(0.0, 0.5, len(pops))
        output = fill * 0.4 * devices * popularity * best / deployment.engine.devices
        for pop, part in zip(pops, share / share.sum(), strict=True):
            tokens = float(output * part)
            rows.append(
                DemandRate(
                    deployment_id=deployment.deployment_id,
                    pop=pop.pop,
                    requests_per_s=round(tokens / 250, 6),
                    uncached_tokens_per_s=round(3 * tokens, 3),
                    output_tokens_per_s=round(tokens, 3),
                )
            )
    return tuple(rows)
