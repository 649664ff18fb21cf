"""The worlds of `ops.sim.roles_table`: a trace, and 36 replicas of two H100 in 8 of 16 cities.

Roles are those that the planner's own code (scheduler/decide/placement/roles.py) gives to the
replicas of each PoP for the trace's mix of tokens, or a fixed ratio.
"""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from isochrone.wire.models.model import UNIFIED_ROLES, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from ops.sim import traces
from ops.sim.cases import MOONCAKE, SERVEGEN, SimulationCase, case_world, fleet_seconds_per_request
from ops.sim.data import EXTRACT
from ops.sim.traces import TraceRequest, TraceSlice
from ops.sim.world import LLAMA_70B_TODAY, EngineProfile, ReplicaSite, RoutingWorld
from scheduler.decide.capacity.step_time import ITL_TARGET_S
from scheduler.decide.placement.roles import (
    ReplicaRole,
    RoleCounts,
    TokenMix,
    role_change,
    role_of_next,
)

REPLICAS: Final = {
    "iad": 6, "sjc": 4, "gru": 4, "lhr": 4, "fra": 6, "bom": 4, "sin": 4, "nrt": 4,
}  # fmt: skip
"""Replicas by city. A PoP of one or two has no use for roles."""

CHUNKS: Final = (512, 2048)
"""Steps that read so many tokens of a prompt: each policy is run with both."""

SETTLING_CHANGES: Final = 64


class RoleWorld(NamedTuple):
    """A trace on replicas of one kind."""

    name: str
    case: SimulationCase

    def requests(self, folder: Path, requests_max: int, draw: int) -> list[TraceRequest]:
        """Return the requests of one draw."""
        path = folder / self.case.path
        if not path.exists():
            path = EXTRACT / self.case.path
        return self.case.read(path, TraceSlice(requests_max, self.case.skip, draw))

    def fleet(self, folder: Path, draw: int, chunk_tokens: int) -> RoutingWorld:
        """Return unified replicas, all of one kind."""
        profile = LLAMA_70B_TODAY.large._replace(chunk_tokens=chunk_tokens)
        world = case_world(self.case, folder, draw)
        chance = random.Random(draw)
        pops = [world.pops.index(city) for city, count in REPLICAS.items() for _ in range(count)]
        return world._replace(
            sites=tuple(
                ReplicaSite(
                    number, pop, profile, profile.prefill_tokens_per_s * chance.uniform(0.9, 1.1)
                )
                for number, pop in enumerate(pops)
            )
        )

    def mix(
        self, fleet: RoutingWorld, requests: Sequence[TraceRequest], cached_share: float
    ) -> TokenMix:
        """Return the mix of tokens of one request per second and replica."""
        prompts = sum(request.prompt_tokens for request in requests) / len(requests)
        answers = sum(request.output_tokens for request in requests) / len(requests)
        profile = fleet.sites[0].profile
        return TokenMix(
            uncached_per_s=prompts * (1 - cached_share),
            output_per_s=answers,
            prefill_rate=profile.prefill_tokens_per_s,
            decode_rate=decode_rate(profile, prompts + answers / 2),
            prompt_step_s=profile.chunk_tokens / profile.prefill_tokens_per_s,
        )


def decode_rate(profile: EngineProfile, context_tokens: float) -> float:
    """Return the tokens per second of the largest batch within memory and the ITL target."""
    each_s = profile.step_per_sequence_s + context_tokens * profile.step_per_context_token_s
    batch = min((ITL_TARGET_S - profile.step_s) / each_s, profile.pool_tokens / context_tokens)
    return batch / (profile.step_s + batch * each_s)


def with_roles(world: RoutingWorld, roles: str, mix: TokenMix) -> RoutingWorld:
    """Return the world with the roles that the planner gives its replicas."""
    policy = PlacementPolicy(roles=roles)
    if roles == UNIFIED_ROLES:
        return world
    sites = list(world.sites)
    for pop in sorted({site.pop for site in sites}):
        numbers = [site.replica for site in sites if site.pop == pop]
        for replica, role in zip(numbers, roles_in_pop(policy, mix, len(numbers)), strict=True):
            sites[replica] = sites[replica]._replace(role=role)
    return world._replace(sites=tuple(sites))


def roles_in_pop(policy: PlacementPolicy, mix: TokenMix, replicas: int) -> list[Role]:
    """Return the roles of a PoP's replicas once nothing changes any more."""
    roles: list[Role] = []
    for _ in range(replicas):
        counts = Counter(roles)
        known = RoleCounts(
            unified=counts[Role.UNIFIED], prefill=counts[Role.PREFILL], decode=counts[Role.DECODE]
        )
        roles.append(role_of_next(policy, mix, known))
    for _ in range(SETTLING_CHANGES):
        running = [
            ReplicaRole(ReplicaId(str(number)), role, 1.0) for number, role in enumerate(roles)
        ]
        change = role_change(policy, mix, running)
        if change is None:
            break
        roles[int(change.replica_id)] = change.role
    return roles


def speed_for(
    load: float, fleet: RoutingWorld, requests: Sequence[TraceRequest], cached_share: float
) -> float:
    """Return the factor that speeds a trace up so that its mean rate is this load.

    The traces' bursts stay; `cases.speed_for_load` scales by the busiest twentieth instead.
    """
    busy_s = len(requests) * fleet_seconds_per_request(fleet, requests, cached_share)
    return load * requests[-1].at_s / busy_s


WORLDS: Final = (
    RoleWorld("Mooncake conversation", MOONCAKE),
    RoleWorld("Mooncake, 4,000 to 8,000", MOONCAKE._replace(skip=4000)),
    RoleWorld("Mooncake, 8,000 to 12,000", MOONCAKE._replace(skip=8000)),
    RoleWorld(
        "arXiv summaries",
        SimulationCase("arXiv", traces.summaries, "traces", LLAMA_70B_TODAY, 0.0, skip=12_000),
    ),
    RoleWorld(
        "reasoning, decode-heavy",
        SERVEGEN._replace(read=partial(traces.sessions, model="deepseek-r1")),
    ),
)
