"""The roles of one deployment's replicas in one PoP, from the demand that this PoP serves.

The mix of tokens is computed for the cities whose load is assigned to the PoP, at the planned hour.
Cities differ: one sends long prompts for short answers, another the opposite. Each role's capacity
is counted in its own unit, on the device classes that the PoP has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from isochrone.wire.engines.engine_capabilities import capabilities_of
from isochrone.wire.ids import PopId, ReplicaId
from isochrone.wire.models.model import UNIFIED_ROLES
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.placement.roles import (
    ReplicaRole,
    RoleChange,
    RoleCounts,
    has_short_steps,
    prefill_wanted,
    role_change,
    role_of_next,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica


class PopRoles(msgspec.Struct, frozen=True, kw_only=True):
    """The roles in one PoP: how many replicas have each, and each role's load and capacity.

    Tokens are per second: uncached prompt tokens to read, and output tokens.
    """

    pop: PopId
    unified: int
    prefill: int
    decode: int
    prefill_wanted: int
    uncached_per_s: float
    prefill_capacity_per_s: float
    output_per_s: float
    output_capacity_per_s: float
    has_short_steps: bool = False

    def words(self) -> str:
        """Return it as text."""
        generating = self.unified + self.decode
        short = "; steps that read prompts are short, so that roles would save no pauses"
        alone = "; the only replica of a PoP does both" if generating + self.prefill == 1 else ""
        reading = (
            f"of {self.prefill_capacity_per_s:.4g} that they can read"
            if self.prefill
            else "read where the answers are generated"
        )
        return (
            f"{self.pop}: {self.prefill} of {self.prefill + generating} replicas prefill"
            f" ({self.prefill_wanted} should): demand {self.uncached_per_s:.4g} uncached prompt"
            f" tokens/s, {reading}; {generating} generate: demand {self.output_per_s:.4g} output"
            f" tokens/s, of {self.output_capacity_per_s:.4g} that they can generate{alone}"
            f"{short if self.has_short_steps else ''}"
        )


def role_of_start(state: DeploymentState, start: PlannedReplica, started: Sequence[Role]) -> Role:
    """Return the role of a new replica, after those that this plan has `started` in its PoP.

    Replicas that run keep their roles. Those of another version do not count: no KV is sent from
    one version to another. An engine that keeps its role generates for a prefill replica from its
    start, also if none runs yet.
    """
    needs, pop = state.needs, start.pop
    if not needs.has_roles:
        return Role.UNIFIED
    version = needs.deployment.version
    running = [
        replica.placement.role
        for replica in state.replicas
        if replica.pop == pop and replica.placement and replica.placement.version == version
    ]
    counts = _counts([*running, *started])
    wanted = role_of_next(needs.deployment.policy, state.token_mix(pop), counts)
    role = state.role_at(start.site, wanted, counts.total == 0)
    return Role.DECODE if role is Role.UNIFIED and _keeps_roles(state) else role


def due_role_changes(state: DeploymentState) -> list[RoleChange]:
    """Return the changes of roles that are due, one in each PoP at most.

    A PoP where a replica starts, or runs another version, changes none: it is about to change
    anyway. An engine that keeps its role gets another one only when it starts.
    """
    changes: list[RoleChange] = []
    is_unified = all(
        replica.placement is None or replica.placement.role is Role.UNIFIED
        for replica in state.replicas
    )
    if _keeps_roles(state) or (is_unified and not state.needs.has_roles):
        return changes
    for pop in sorted(set(state.pops())):
        replicas = [replica for replica in state.replicas if replica.pop == pop]
        if not all(_has_settled(state, replica) for replica in replicas):
            continue
        running = [
            ReplicaRole(r.placement.replica_id, r.placement.role, r.placement.age_s)
            for r in replicas
            if r.placement is not None
        ]
        sites = {r.placement.replica_id: r.site for r in replicas if r.placement is not None}

        def may_have(replica_id: ReplicaId, role: Role, sites: Mapping[ReplicaId, int]) -> bool:
            return state.role_at(sites[replica_id], role, is_first=False) is role

        policy = state.needs.deployment.policy
        change = role_change(policy, state.token_mix(pop), running, partial(may_have, sites=sites))
        if change is not None:
            changes.append(change)
    return changes


def roles_by_pop(state: DeploymentState) -> list[PopRoles]:
    """Return the roles of each PoP with a running replica; none for a deployment without roles."""
    policy = state.needs.deployment.policy
    if not state.needs.has_roles:
        return []
    described = []
    for pop in sorted(set(state.pops())):
        roles = [r.placement.role for r in state.replicas if r.placement and r.pop == pop]
        counts, mix = _counts(roles), state.token_mix(pop)
        described.append(
            PopRoles(
                pop=pop,
                unified=counts.unified,
                prefill=counts.prefill,
                decode=counts.decode,
                prefill_wanted=prefill_wanted(policy, mix, counts),
                uncached_per_s=mix.uncached_per_s,
                prefill_capacity_per_s=counts.prefill * mix.prefill_rate,
                output_per_s=mix.output_per_s,
                output_capacity_per_s=(counts.unified + counts.decode) * mix.decode_rate,
                has_short_steps=has_short_steps(policy, mix, counts),
            )
        )
    return described


def _keeps_roles(state: DeploymentState) -> bool:
    deployment = state.needs.deployment
    able = capabilities_of(deployment.engine.driver)
    return able.fixed_roles and deployment.policy.roles != UNIFIED_ROLES


def _has_settled(state: DeploymentState, replica: PlannedReplica) -> bool:
    placement = replica.placement
    return (
        placement is not None
        and placement.state is ReplicaState.WARM
        and placement.version == state.needs.deployment.version
    )


def _counts(roles: Iterable[Role]) -> RoleCounts:
    numbers = Counter(roles)
    return RoleCounts(
        unified=numbers[Role.UNIFIED], prefill=numbers[Role.PREFILL], decode=numbers[Role.DECODE]
    )
