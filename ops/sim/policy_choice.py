"""Creates the policies of a run by name: one instance for each router."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ops.sim.cache_policies import EstimatePolicy, ExactPolicy, LoadsPolicy, PrefixesPolicy
from ops.sim.isochrone_policy import IsochronePolicy, route_table
from ops.sim.oracle import OraclePolicy, next_turns
from ops.sim.policies import (
    CacheAwarePolicy,
    ConsistentHashPolicy,
    LeastRequestsPolicy,
    LeastTokensNearPolicy,
    LeastTokensPolicy,
    NearestOnlyPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
    SkyLbPolicy,
)
from ops.sim.replica import SimulatedReplica
from ops.sim.rivals import (
    AibrixPolicy,
    DynamoPolicy,
    LlmdPolicy,
    ProductionStackPolicy,
    SkyLbSourcePolicy,
    SmgPolicy,
)
from ops.sim.router import SimulatedRouter
from ops.sim.traces import TraceRequest

POLICY_NAMES: Final = (
    "ours",
    "random",
    "round robin",
    "nearest only",
    "least requests",
    "least tokens",
    "least tokens, near",
    "consistent hash",
    "cache aware",
    "SkyLB",
)

OWN_POLICIES: Final[Mapping[str, type[IsochronePolicy]]] = {
    "ours": IsochronePolicy,
    "estimate": EstimatePolicy,
    "prefixes": PrefixesPolicy,
    "exact": ExactPolicy,
    "loads": LoadsPolicy,
}
"""Our own choice, and with other knowledge of the replicas (cache_policies.py)."""

RIVAL_NAMES: Final = (
    "llm-d",
    "Dynamo",
    "smg cache_aware",
    "AIBrix",
    "production-stack",
    "SkyLB, its source",
)
"""Other routers as their sources define them (rivals.py)."""


def create_policies(
    name: str,
    routers: Sequence[SimulatedRouter],
    replicas: list[SimulatedReplica],
    requests: Sequence[TraceRequest],
    clock: Callable[[], float],
) -> list[RoutingPolicy]:
    """Return a policy for each router. An oracle's name has its congestion charge and foresight."""
    world = routers[0].world
    if name.startswith("oracle"):
        numbers = [float(number) for number in name.split()[1:]]
        charge, foresight = [*numbers, 0.0, 0.0][:2]
        turns = next_turns(requests, world) if foresight else {}
        oracle = OraclePolicy(replicas, charge, foresight, turns)
        return [oracle for _ in routers]
    kind = OWN_POLICIES.get(name)
    if kind is not None:
        table = route_table(world)
        return [kind(router, table, clock) for router in routers]
    create: dict[str, Callable[[int], RoutingPolicy]] = {
        "random": RandomPolicy,
        "round robin": RoundRobinPolicy,
        "nearest only": NearestOnlyPolicy,
        "least requests": lambda _: LeastRequestsPolicy(),
        "least tokens": lambda _: LeastTokensPolicy(),
        "least tokens, near": lambda _: LeastTokensNearPolicy(),
        "consistent hash": lambda _: ConsistentHashPolicy(len(replicas)),
        "cache aware": lambda _: CacheAwarePolicy(),
        "SkyLB": lambda _: SkyLbPolicy(),
        "llm-d": lambda pop: LlmdPolicy(pop, replicas),
        "Dynamo": lambda pop: DynamoPolicy(pop, replicas),
        "smg cache_aware": SmgPolicy,
        "AIBrix": AibrixPolicy,
        "production-stack": ProductionStackPolicy,
        "SkyLB, its source": SkyLbSourcePolicy,
    }
    return [create[name](router.pop) for router in routers]
