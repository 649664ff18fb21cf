"""The fleet of the control plane benchmark: generated from a seed.

The fleet is written directly to the database, in steady state: every node has devices and one warm
replica, every deployment has the replicas it requires.
"""

import hashlib
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import asyncpg
import msgspec

from isochrone.service.trust import identity as identities
from isochrone.service.trust.identity import Authority, Identity
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    DeviceId,
    ModelId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import (
    Artifact,
    ArtifactFile,
    CatalogModel,
    EngineSettings,
    PlacementPolicy,
)
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import NodeDevice
from ops.bench.control_plane_peers import SimulatedPeer

GIB: Final = 1024**3
POPS: Final = 190
MODELS: Final = 1000
COUNTRIES: Final = ("NL", "DE", "US", "SG", "BR", "JP", "IN", "ZA", "AU", "GB")


class SimulatedFleet(NamedTuple):
    """The simulated agents and routers, and the ids of the deployments."""

    agents: list[SimulatedPeer]
    routers: list[SimulatedPeer]
    deployments: list[str]


def make_fleet(
    authority: Authority,
    cluster_id: ClusterId,
    *,
    agents: int,
    routers: int,
    devices: int,
    replicas: int,
) -> SimulatedFleet:
    """Return peers with certificates, agents with so many replicas each.

    They share one key, to save making thousands.
    """
    pops = pop_names()
    key_pem = identities.new_key_pem()
    csr_pem = identities.make_csr(key_pem, "bench")
    now = datetime.now(UTC)

    def identity(role: PeerRole, name: str, pop: str) -> Identity:
        certificate = authority.issue(csr_pem, role=role, name=name, pop=PopId(pop), now=now)
        return Identity(
            name=name,
            role=role,
            pop=PopId(pop),
            cluster_id=cluster_id,
            key_pem=key_pem,
            certificate_pem=certificate,
            ca_pem=authority.ca_pem,
        )

    gpus = tuple(
        NodeDevice(
            device_id=DeviceId(f"gpu{index}"),
            device_class="h100-80g",
            memory_bytes=80 * GIB,
        )
        for index in range(devices)
    )
    return SimulatedFleet(
        agents=[
            SimulatedPeer(
                identity=identity(PeerRole.AGENT, f"n{index:05}", pops[index % POPS]),
                specs=tuple(_spec(index + place * agents, place) for place in range(replicas)),
                devices=gpus,
                is_stuck=index == 0,
            )
            for index in range(agents)
        ],
        routers=[
            SimulatedPeer(identity=identity(PeerRole.ROUTER, f"r{index:05}", pops[index % POPS]))
            for index in range(routers)
        ],
        deployments=[f"d{index:04}" for index in range(MODELS)],
    )


def pop_names() -> list[str]:
    """Return the names of the PoPs."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(name) for name in product(letters[:8], letters, letters)][:POPS]


async def seed_keys(dsn: str, keys: int) -> None:
    """Write so many keys of a thousand tenants to the database."""
    connection = await asyncpg.connect(dsn, command_timeout=600.0)
    await connection.execute(
        """
        INSERT INTO api_key (key_id, secret_sha256, tenant_id, limits)
        SELECT substr(md5(n::text), 1, 12), md5(n::text) || md5((-n)::text), 'tenant-' || n % 1000,
               jsonb_build_object('requests_per_min', 600 + n % 10, 'tokens_per_min', 1000000)
        FROM generate_series(1, $1) n
        """,
        keys,
    )
    await connection.execute("ANALYZE api_key")
    await connection.close()


async def seed_store(dsn: str, fleet: SimulatedFleet) -> None:
    """Write the fleet to an empty, migrated database."""
    chance = random.Random(5)
    connection = await asyncpg.connect(dsn)
    await connection.executemany(
        "INSERT INTO pop (pop, city, country, latitude, longitude) VALUES ($1, $1, $2, $3, $4)",
        [
            (name, chance.choice(COUNTRIES), chance.uniform(-50, 60), chance.uniform(-180, 180))
            for name in pop_names()
        ],
    )
    replicas = -(-sum(len(peer.specs) for peer in fleet.agents) // MODELS)
    policy = msgspec.json.encode(
        PlacementPolicy(replicas_min=replicas, replicas_max=replicas)
    ).decode()
    for index in range(MODELS):
        spec = _spec(index)
        await connection.execute(
            "INSERT INTO model (model_id, spec) VALUES ($1, $2)",
            spec.model_id,
            msgspec.json.encode(_model(index)).decode(),
        )
        await connection.execute(
            "INSERT INTO deployment (deployment_id, name, model_id, engine, policy)"
            " VALUES ($1, $2, $3, $4, $5)",
            spec.deployment_id,
            spec.name,
            spec.model_id,
            msgspec.json.encode(spec.engine).decode(),
            policy,
        )
    await _seed_peers(connection, fleet)
    await connection.execute("ANALYZE")
    await connection.close()


async def _seed_peers(connection: asyncpg.Connection, fleet: SimulatedFleet) -> None:
    await connection.executemany(
        "INSERT INTO router (router_id, pop) VALUES ($1, $2)",
        [(peer.identity.name, peer.identity.pop) for peer in fleet.routers],
    )
    await connection.executemany(
        "INSERT INTO node (node_id, pop, address) VALUES ($1, $2, $3)",
        [(p.identity.name, p.identity.pop, f"http://{p.identity.name}:9000") for p in fleet.agents],
    )
    await connection.executemany(
        "INSERT INTO device (node_id, device_id, device_class, memory_bytes)"
        " VALUES ($1, $2, $3, $4)",
        [
            (peer.identity.name, device.device_id, device.device_class, device.memory_bytes)
            for peer in fleet.agents
            for device in peer.devices
        ],
    )
    placements = [(peer.identity.name, spec) for peer in fleet.agents for spec in peer.specs]
    await connection.executemany(
        """
        INSERT INTO placement (replica_id, deployment_id, version, node_id, memory_bytes, spec,
                               reason, placed_generation, state)
        VALUES ($1, $2, 1, $3, $4, $5, 'seeded', 1, 'warm')
        """,
        [
            (s.replica_id, s.deployment_id, node, s.memory_bytes, msgspec.json.encode(s).decode())
            for node, s in placements
        ],
    )
    await connection.executemany(
        "INSERT INTO placement_device (replica_id, node_id, device_id, memory_bytes)"
        " VALUES ($1, $2, $3, $4)",
        [
            (spec.replica_id, node, spec.device_ids[0], spec.memory_bytes)
            for node, spec in placements
        ],
    )


def write_orders(path: Path, orders: msgspec.Struct) -> None:
    """Write the orders of one process of peers."""
    path.write_bytes(msgspec.msgpack.encode(orders))


def deal(peers: Sequence[SimulatedPeer], count: int) -> list[tuple[SimulatedPeer, ...]]:
    """Split the peers evenly over `count` processes."""
    return [tuple(peers[index::count]) for index in range(count)]


def _model(index: int) -> CatalogModel:
    files = tuple(
        ArtifactFile(
            path=f"model-{part}.safetensors",
            size_bytes=9 * GIB,
            sha256=hashlib.sha256(f"{index}/{part}".encode()).hexdigest(),
        )
        for part in range(4)
    )
    return CatalogModel(
        model_id=f"m{index:04}",
        architecture="LlamaForCausalLM",
        artifact=Artifact(
            source=f"hf:bench/m{index:04}@v1", files=files, digest=manifest_digest(files)
        ),
        context_tokens=32_768,
        weights_bytes=36 * GIB,
    )


def _spec(index: int, device: int = 0) -> ReplicaSpec:
    model = _model(index % MODELS)
    return ReplicaSpec(
        replica_id=ReplicaId(f"rep-{index:05}"),
        deployment_id=DeploymentId(f"d{index % MODELS:04}"),
        version=1,
        name=f"bench/{model.model_id}",
        model_id=ModelId(model.model_id),
        artifact=model.artifact,
        context_tokens=32_768,
        engine=EngineSettings(driver="vllm", context_tokens_max=32_768, kv_memory_bytes=20 * GIB),
        device_ids=(DeviceId(f"gpu{device}"),),
        memory_bytes=60 * GIB,
    )
