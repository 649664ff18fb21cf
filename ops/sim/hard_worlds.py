"""The worlds of `make sim`: settings in which a choice of replica is harder than over 16 cities.

A world is a trace, a fleet and what goes wrong in it. A draw decides the real rate of each replica,
the city of each session, ServeGen's conversations, and which replicas die.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim.cases import AZURE, CODE, MOONCAKE, SERVEGEN, SimulationCase, case_world
from ops.sim.data import EXTRACT
from ops.sim.losses import ReplicaLoss, draw_losses
from ops.sim.one_pop import one_pop
from ops.sim.traces import TraceRequest, TraceSlice
from ops.sim.world import (
    LLAMA_70B_TODAY,
    EngineProfile,
    ReplicaSite,
    RoutingWorld,
    SimulatedModel,
)

SLOW_FACTOR: Final = 2.0
"""How many times slower a slow replica is than its profile says."""


class HardWorld(NamedTuple):
    """One setting: one PoP of `one_pop_replicas` equal replicas, or with 0 the 16 cities."""

    name: str
    case: SimulationCase
    one_pop_replicas: int = 0
    cache_factor: float = 1.0
    lost_share: float = 0.0
    has_slow_replica: bool = False

    def build(self, folder: Path, draw: int) -> RoutingWorld:
        """Return the fleet of one draw."""
        model = scale_cache(self.case.model, self.cache_factor)
        if self.one_pop_replicas:
            world = one_pop(model, self.one_pop_replicas)
        else:
            world = case_world(self.case._replace(model=model), folder, draw)
        return with_slow_replica(world) if self.has_slow_replica else world

    def requests(self, folder: Path, requests_max: int, draw: int) -> list[TraceRequest]:
        """Return the requests of one draw."""
        path = folder / self.case.path
        if not path.exists():
            path = EXTRACT / self.case.path
        return self.case.read(path, TraceSlice(requests_max, self.case.skip, draw))

    def losses(self, world: RoutingWorld, duration_s: float, draw: int) -> Sequence[ReplicaLoss]:
        """Return which replicas die in one draw, and when."""
        return draw_losses(world, self.lost_share, duration_s, draw) if self.lost_share else ()


def scale_cache(model: SimulatedModel, factor: float) -> SimulatedModel:
    """Return the model with prefix caches of another size."""

    def scaled(profile: EngineProfile) -> EngineProfile:
        return profile._replace(
            cache_tokens=round(factor * profile.cache_tokens),
            pool_tokens=round(factor * profile.pool_tokens),
        )

    return SimulatedModel(scaled(model.large), scaled(model.small))


def with_slow_replica(world: RoutingWorld) -> RoutingWorld:
    """Return the world with a first replica that is slower than the route table says."""
    first, *others = world.sites
    profile = first.profile._replace(
        step_s=SLOW_FACTOR * first.profile.step_s,
        step_per_sequence_s=SLOW_FACTOR * first.profile.step_per_sequence_s,
    )
    slow = ReplicaSite(first.replica, first.pop, profile, first.true_rate / SLOW_FACTOR)
    return world._replace(sites=(slow, *others))


MOONCAKE_70B: Final = MOONCAKE._replace(name="Mooncake, 70B", model=LLAMA_70B_TODAY)
SERVEGEN_70B: Final = SERVEGEN._replace(name="ServeGen, 70B", model=LLAMA_70B_TODAY)

WORLDS: Final = (
    *(HardWorld(f"one PoP of {n}, Mooncake", MOONCAKE, n) for n in (2, 8, 16, 64)),
    *(HardWorld(f"one PoP of {n}, ServeGen", SERVEGEN, n) for n in (2, 8, 16, 64)),
    *(
        HardWorld(f"16 cities, cache x {label}, Mooncake", MOONCAKE, cache_factor=factor)
        for label, factor in (("1/8", 0.125), ("1/4", 0.25), ("1", 1.0), ("2", 2.0))
    ),
    HardWorld("16 cities, cache x 1/8, ServeGen", SERVEGEN, cache_factor=0.125),
    HardWorld("one PoP of 8, cache x 1/8, Mooncake", MOONCAKE, 8, cache_factor=0.125),
    HardWorld("16 cities, 70B of today, Mooncake", MOONCAKE_70B),
    HardWorld("16 cities, 70B of today, ServeGen", SERVEGEN_70B),
    HardWorld("one PoP of 8, 70B of today, ServeGen", SERVEGEN_70B, 8),
    HardWorld("16 cities, a third lost, Mooncake", MOONCAKE, lost_share=1 / 3),
    HardWorld("16 cities, a third lost, ServeGen", SERVEGEN, lost_share=1 / 3),
    HardWorld("16 cities, one slow replica, Mooncake", MOONCAKE, has_slow_replica=True),
    HardWorld("one PoP of 8, one slow, ServeGen", SERVEGEN, 8, has_slow_replica=True),
    HardWorld("16 cities, Azure conversation", AZURE),
    HardWorld("16 cities, Azure code", CODE),
)
