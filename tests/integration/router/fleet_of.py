"""Route tables, identities and running routers for tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from isochrone.service.trust.identity import Authority, Identity, make_csr, new_key_pem
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
from router.app import RouterApp, open_router
from router.config import RouterConfig
from tests.integration.router.fake_node import FakeNode, open_node

CLUSTER = ClusterId("c-1")
KEY = format_key(KeyId("k" * 12), b"\x01" * 32)
COORDINATES = {"ams": (52.3, 4.8), "iad": (38.9, -77.4), "sin": (1.36, 103.9)}


def a_key(text: str = KEY, **fields: Any) -> KeyEntry:
    """Return the route table's entry of an API key."""
    parsed = parse_key(text)
    assert parsed is not None
    return KeyEntry(key_id=parsed[0], secret_sha256=parsed[1], tenant_id=TenantId("acme"), **fields)


def a_route(node: FakeNode, replica: str = "", **fields: Any) -> Route:
    """Return the route to a node's replica."""
    values: dict[str, Any] = {"prefill_tokens_per_s": 5000.0, **fields}
    return Route(
        replica_id=ReplicaId(replica or f"r-{node.name}"),
        deployment_id=DeploymentId("d-1"),
        version=1,
        node_id=NodeId(node.name),
        pop=PopId(node.pop),
        address=node.address,
        **values,
    )


def a_table(
    routes: Sequence[Route],
    *,
    generation: int = 1,
    keys: Sequence[KeyEntry] = (),
    names: Sequence[str] = ("tiny",),
    epoch: int = 1,
) -> RouteTable:
    """Return a table over one deployment called `tiny`."""
    pops = [
        Pop(pop=PopId(name), city=name, country="XX", latitude=position[0], longitude=position[1])
        for name, position in sorted(COORDINATES.items())
    ]
    return RouteTable(
        cluster_id=CLUSTER,
        generation=Generation(generation),
        epoch=Epoch(epoch),
        pops=tuple(pops),
        deployments=tuple(
            DeploymentEntry(
                deployment_id=DeploymentId(f"d-{n}"),
                name=name,
                model_id=ModelId("m"),
                context_tokens=4096,
            )
            for n, name in enumerate(names, 1)
        ),
        routes=tuple(sorted(routes, key=lambda route: route.replica_id)),
        keys=KeyTable.of(list(keys) or [a_key()]),
    )


def an_identity(folder: Path, pop: str = "ams") -> Identity:
    """Return a router's identity, issued by a new certificate authority."""
    now = datetime.now(UTC)
    authority = Authority.create(folder / "authority", "test", now)
    key_pem = new_key_pem()
    certificate = authority.issue(
        make_csr(key_pem, "router-1"),
        role=PeerRole.ROUTER,
        name="router-1",
        pop=PopId(pop),
        now=now,
    )
    return Identity(
        name="router-1",
        role=PeerRole.ROUTER,
        pop=PopId(pop),
        cluster_id=CLUSTER,
        key_pem=key_pem,
        certificate_pem=certificate,
        ca_pem=authority.ca_pem,
    )


def a_config(folder: Path, **fields: Any) -> RouterConfig:
    """Return a configuration with deadlines short enough for tests."""
    values: dict[str, Any] = {
        "state_folder": folder / "state",
        "port": 0,
        "head_timeout_s": 0.5,
        "body_timeout_s": 0.5,
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 2.0,
        "token_timeout_s": 0,
        "stream_idle_timeout_s": 0.5,
        "queue_timeout_s": 0.4,
        "probe_interval_s": 0.1,
        "probe_timeout_s": 0.3,
        "usage_interval_s": 0.1,
        "demand_interval_s": 0.2,
        "usage_resend_s": 0.3,
        "drain_timeout_s": 3.0,
        **fields,
    }
    return RouterConfig(**values)


class Bench:
    """A running router, its nodes, and an HTTP client with a valid key."""

    def __init__(
        self, app: RouterApp, nodes: Sequence[FakeNode], http: aiohttp.ClientSession
    ) -> None:
        self.app = app
        self.nodes = nodes
        self.http = http
        self.url = f"http://127.0.0.1:{app.port}"

    def chat(self, content: str = "hello", **fields: Any) -> Any:
        """Send a chat request; use the result as a context manager."""
        headers = fields.pop("headers", {})
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def a_bench(
    folder: Path,
    nodes: int | Sequence[FakeNode] = 1,
    *,
    limits: KeyLimits | None = None,
    route: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Bench]:
    """Run a router with fake nodes, and a route table with all of them."""
    if isinstance(nodes, int):
        nodes = [FakeNode(f"n{number}") for number in range(1, nodes + 1)]
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(open_node(node))
        app = await stack.enter_async_context(
            open_router(a_config(folder, **config), an_identity(folder))
        )
        key = a_key(limits=limits or KeyLimits())
        app.follower.accept(a_table([a_route(node, **(route or {})) for node in nodes], keys=[key]))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"})
        )
        yield Bench(app, nodes, http)
