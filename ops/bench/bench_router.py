"""Our router as in production, with a given backend, a route table on disk and no scheduler.

`python -m ops.bench.bench_router PORT BACKEND_PORT FOLDER [PROCESSES]` prints a key and serves.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from isochrone.service import files
from isochrone.service.trust.identity import (
    Authority,
    Identity,
    make_csr,
    new_key_pem,
    save_identity,
)
from isochrone.wire import codec
from isochrone.wire.client_keys.keys import format_key, parse_key
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
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyEntry,
    KeyLimits,
    KeyTable,
    Pop,
    Route,
    RouteTable,
)

KEY = format_key(KeyId("b" * 12), b"\x02" * 32)


def replica_host(number: int) -> str:
    """Return the loopback address of a replica: each has its own, the first the usual one."""
    return "127.0.0.1" if number == 0 else f"127.0.1.{number}"


def route_table(backend_port: int, routes: int, prefill_tokens_per_s: float = 1e6) -> RouteTable:
    """Return a table of one deployment with `routes` replicas at the backend, and a limited key."""
    parsed = parse_key(KEY)
    assert parsed is not None
    return RouteTable(
        cluster_id=ClusterId("bench"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=(Pop(pop=PopId("ams"), city="Amsterdam", country="NL", latitude=52, longitude=5),),
        deployments=(
            DeploymentEntry(
                deployment_id=DeploymentId("d-1"),
                name="bench",
                model_id=ModelId("m-1"),
                context_tokens=131_072,
            ),
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(f"r-{n:03d}"),
                deployment_id=DeploymentId("d-1"),
                version=1,
                node_id=NodeId(f"n-{n:03d}"),
                pop=PopId("ams"),
                address=f"{replica_host(n)}:{backend_port}",
                tokens_in_flight_max=1_000_000_000,
                prefill_tokens_per_s=prefill_tokens_per_s,
            )
            for n in range(routes)
        ),
        keys=KeyTable.of(
            [
                KeyEntry(
                    key_id=parsed[0],
                    secret_sha256=parsed[1],
                    tenant_id=TenantId("acme"),
                    limits=KeyLimits(
                        requests_per_min=100_000_000,
                        tokens_per_min=2_000_000_000,
                        concurrency=100_000,
                    ),
                )
            ]
        ),
    )


def identity(folder: Path) -> Identity:
    """Return a router's identity, issued by a new certificate authority."""
    now = datetime.now(UTC)
    authority = Authority.create(folder / "authority", "bench", now)
    key_pem = new_key_pem()
    certificate = authority.issue(
        make_csr(key_pem, "router-1"),
        role=PeerRole.ROUTER,
        name="router-1",
        pop=PopId("ams"),
        now=now,
    )
    return Identity(
        name="router-1",
        role=PeerRole.ROUTER,
        pop=PopId("ams"),
        cluster_id=ClusterId("bench"),
        key_pem=key_pem,
        certificate_pem=certificate,
        ca_pem=authority.ca_pem,
    )


def main() -> None:
    """Write the state of a router that ran before, and become that router."""
    port, backend_port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    processes = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    replicas = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    state = folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    save_identity(state, identity(folder))
    files.write_snapshot(
        state / "table.snapshot", codec.encode(route_table(backend_port, replicas))
    )
    config = folder / "router.toml"
    config.write_text(
        f'state_folder = "{state}"\nport = {port}\nprocesses = {processes}\n'
        f"parse_bytes_per_key_per_s = {1 << 40}\n"
        'connections_per_address_max = 20_000\nprivate_host = "127.0.0.1"\n'
    )
    print(KEY, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "router", "--config", str(config)])


if __name__ == "__main__":
    main()
