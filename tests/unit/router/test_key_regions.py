"""Whatever favours a replica outside a key's regions, its requests stay within them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

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
    RequestId,
    TenantId,
)
from isochrone.wire.models.model import Artifact
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyEntry,
    KeyTable,
    Pop,
    RolloutEntry,
    Route,
    RouteTable,
)
from router.attempt_runner import AttemptRunner
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.upstream import Upstream
from router.decide.caches.prefix_index import prefix_keys
from router.decide.choice.handoff import handoff_peers
from router.fleet_state import FleetState
from router.inference_request import InferenceRequest
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.usage_journal import UsageJournal
from router.request_context import NO_REPLICAS, ReplicaAttempt, RequestContext

NOW_S = 1000.0
COUNTRIES = {"ams": "NL", "fra": "DE", "sin": "SG"}
PROMPT = b"x" * 40_000
KEYS = prefix_keys(PROMPT, 7)
ADAPTER = AdapterEntry(
    adapter_id="ft-1",
    name="mine",
    tenant_id=TenantId("acme"),
    model_id=ModelId("m"),
    rank=8,
    artifact=Artifact(source="cluster:adapters/ft-1", files=(), digest="b" * 64),
)


def a_route(pop: str, number: int, role: Role = Role.UNIFIED, version: int = 1) -> Route:
    name = f"{pop}-{role.value}-{number}"
    return Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        version=version,
        node_id=NodeId(f"n-{name}"),
        pop=PopId(pop),
        address=f"{name}:1",
        role=role,
        prefill_tokens_per_s=1000.0,
    )


ROUTES = [a_route(pop, number) for pop in COUNTRIES for number in (1, 2)]
OUTSIDE = ReplicaId("ams-unified-1")
"""The replica that each case favours: of the router's own city."""


def a_table(*routes: Route, countries: dict[str, str] = COUNTRIES, **deployment: Any) -> RouteTable:
    pops = [
        Pop(pop=PopId(pop), city=pop, country=country, latitude=50.0, longitude=index * 10.0)
        for index, (pop, country) in enumerate(countries.items())
    ]
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d"),
        name="m",
        model_id=ModelId("m"),
        context_tokens=100_000,
        **deployment,
    )
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=tuple(pops),
        deployments=(entry,),
        routes=tuple(sorted(routes or ROUTES, key=lambda route: route.replica_id)),
        keys=KeyTable(),
    )


class Router:
    """The decisions of a router in Amsterdam, with a request of a key limited to Germany."""

    def __init__(self, table: RouteTable, folder: Path) -> None:
        def clock() -> float:
            return NOW_S

        config, metrics = RouterConfig(state_folder=folder), Metrics()
        self.fleet = FleetState(PopId("ams"), clock, "router-1")
        self.fleet.adopt(table)
        self.routes = table.routes
        self.attempts = AttemptRunner(
            config=config,
            fleet=self.fleet,
            upstream=Upstream(config, Deadlines(clock), clock),
            recorder=Recorder(PopId("ams"), metrics, UsageJournal(folder, time.monotonic)),
            metrics=metrics,
            clock=clock,
            tracer=None,
        )

    def context(self, request_id: str = "r", regions: tuple[str, ...] = ("DE",)) -> RequestContext:
        key = KeyEntry(
            key_id=KeyId("k"), secret_sha256="", tenant_id=TenantId("acme"), regions=regions
        )
        (deployment,) = self.fleet.directory.deployments
        request = InferenceRequest(
            request_id=RequestId(request_id),
            client_request_id=request_id,
            key=key,
            deployment=deployment,
            path="/v1/chat/completions",
            body=b"{}",
            text_bytes=len(PROMPT),
            answer_count=1,
            output_tokens_max=100,
            is_stream=True,
            wants_usage=False,
            session="acme/s",
            reject_if_busy=False,
            arrived_s=NOW_S,
            started_at=NOW_S,
            encode_error_event=lambda error: b"",
            build_resume_body=None,
            determinism="",
            prefix_keys=KEYS,
            adapter=ADAPTER,
        )
        return RequestContext(request, 10_000)

    def pops_ranked(self, context: RequestContext) -> list[str]:
        """Return the PoPs of the replicas that the request may be sent to."""
        routes = self.attempts.rank(context)
        return [str(routes[index].route.pop) for index in range(len(routes))]


def favour_nothing(router: Router) -> None:
    """The router's own city is nearer than Germany."""


def bind_session(router: Router) -> None:
    router.fleet.sessions.bind("acme/s", OUTSIDE, 9_000, NOW_S)


def load_adapter(router: Router) -> None:
    places = router.fleet.routing(DeploymentId("d")).adapters
    places.record_loaded(OUTSIDE, ("ft-1",), 0, 1.0)


def cache_prompt(router: Router) -> None:
    context = router.context(regions=())
    ranked = next(one for one in router.attempts.rank(context) if one.route.replica_id == OUTSIDE)
    attempt = ReplicaAttempt(ranked)
    router.attempts._reserve(context, attempt, ranked, router.fleet.clock())
    attempt.release_tokens()


def fill_the_region(router: Router) -> None:
    for number in (1, 2):
        router.fleet.in_flight.reserve(
            ReplicaId(f"fra-unified-{number}"), prefill=500_000, decode=500_000
        )


@pytest.mark.parametrize(
    "favour", [favour_nothing, bind_session, load_adapter, cache_prompt, fill_the_region]
)
def test_requests_stay_in_the_regions_of_their_key(
    tmp_path: Path, favour: Callable[[Router], None]
) -> None:
    router = Router(a_table(), tmp_path)
    favour(router)
    unlimited = router.pops_ranked(router.context(regions=()))
    assert set(unlimited) == {"ams", "sin", *(() if favour is fill_the_region else ("fra",))}
    assert unlimited[0] == "ams"
    assert set(router.pops_ranked(router.context())) <= {"fra"}
    assert router.pops_ranked(router.context(regions=("nowhere",))) == []


def test_an_attempt_after_failures_stays_there(tmp_path: Path) -> None:
    router = Router(a_table(), tmp_path)
    context = router.context()
    context.excluded.failed |= {ReplicaId("fra-unified-1")}
    context.excluded.cannot_resume |= {ReplicaId("fra-unified-2")}
    assert router.pops_ranked(context) == []
    context.excluded.failed = NO_REPLICAS
    assert router.pops_ranked(context) == ["fra"]


def test_who_reads_the_prompt_or_has_its_prefix_is_there_too(tmp_path: Path) -> None:
    readers = [a_route(pop, number, Role.PREFILL) for pop in COUNTRIES for number in (1, 2)]
    router = Router(a_table(*ROUTES, *readers, shares_kv=True), tmp_path)
    cache_prompt(router)
    context = router.context()
    routes = router.attempts.rank(context)
    named = [
        *handoff_peers(routes, routes[0]),
        *router.attempts._prefill_peers(context, routes[0]),
        *router.attempts._holders(context, routes[0]).replicas,
    ]
    kinds = {str(peer.replica_id).rpartition("-")[0] for peer in named}
    assert kinds == {"fra-unified", "fra-prefill"}
    assert len(named) == 2 + 3 + 2


@pytest.mark.parametrize("version", [1, 2])
def test_the_version_that_the_regions_have_answers_during_a_rollout(
    tmp_path: Path, version: int
) -> None:
    routes = [a_route("fra", 1, version=version), a_route("ams", 1, version=3 - version)]
    rollout = RolloutEntry(version=2, share=0.5)
    router = Router(a_table(*routes, rollout=rollout), tmp_path)
    contexts = [router.context(f"r{number}") for number in range(20)]
    for context in contexts:
        context.request.session = ""
    assert [router.pops_ranked(context) for context in contexts] == [["fra"]] * 20


def test_regions_follow_the_table(tmp_path: Path) -> None:
    router = Router(a_table(), tmp_path)
    assert set(router.pops_ranked(router.context(regions=("DE", "sin")))) == {"fra", "sin"}
    table = a_table(countries={**COUNTRIES, "fra": "FR"})
    # The same routes: only where their PoP is has changed.
    router.fleet.adopt(msgspec.structs.replace(table, routes=router.routes))
    assert router.pops_ranked(router.context()) == []
    assert set(router.pops_ranked(router.context(regions=("FR",)))) == {"fra"}
