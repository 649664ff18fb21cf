"""The roles of a deployment's replicas: how many of a PoP's replicas only read prompts.

A role counts in its own unit: a prefill replica in uncached prompt tokens per second, a decode
replica in output tokens per second. With `auto`, the share of prefill replicas is the share of the
replicas' time that reading prompts takes. Roles shorten the pauses between tokens, and first tokens
come later with them. So replicas stay unified where the engine's own steps are so short that pauses
stay within the target, unless the policy pins its roles to devices.

An engine can do the work of every role, so a running replica changes its role without loading
anything: only the routers are notified. In each PoP one replica at a time changes its role, and in
`auto` only once the demand's mix has moved by clearly more than the next replica needs.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import ReplicaId
from isochrone.wire.models.model import AUTO_ROLES, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from scheduler.decide.capacity.step_time import ITL_TARGET_S

HYSTERESIS: Final = 0.1
"""In `auto`, the share of prefill replicas stays while the best share differs by less than this."""

AUTO_SHARE_MIN: Final = 0.4
"""In `auto`, replicas stay unified while reading prompts takes a smaller share of their time: then
few steps have a prompt in them, and roles would only delay first tokens (`ops.sim.roles_table`,
where the decode-heavy mix has a share of 0.3 and the others of 0.7)."""

SHARE_MARGIN: Final = 0.05
"""In `auto`, existing prefill replicas keep their role until that share is smaller by this."""

AUTO_ROUNDING: Final = 0.1
"""In `auto`, this share of a prefill replica may lack work. A decode replica can read the prompts
that prefill replicas have no time for, but a prefill replica cannot generate, so the rest is
rounded down: two replicas stay unified until reading takes nearly half of their time."""

CHANGE_MARGIN: Final = 0.25
"""In `auto`, a running replica changes its role if this share of a replica's time would be used
better after the change: a mix at the border of two ratios changes nothing."""

STEP_MARGIN: Final = 0.8
"""In `auto`, existing prefill replicas keep their role until steps that read prompts are shorter
than this share of the target: a measured speed near the border changes nothing."""

ROUNDING: Final = 1e-9
"""Allows for rounding errors: two thirds of three replicas are two."""

_FIXED: Final = re.compile(r"prefill=(\d+),decode=(\d+)")


class RoleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a deployment in one PoP, by role."""

    unified: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.unified + self.prefill + self.decode


class ReplicaRole(NamedTuple):
    """A running replica and its role."""

    replica_id: ReplicaId
    role: Role
    age_s: float


class RoleChange(NamedTuple):
    """The role that a running replica is to have, and why."""

    replica_id: ReplicaId
    role: Role
    reason: str


class PrefillBounds(NamedTuple):
    """The fewest prefill replicas that a PoP needs, and the most that have work."""

    least: int
    most: int


class TokenMix(msgspec.Struct, frozen=True, kw_only=True):
    """The demand that a PoP serves of a deployment, and one replica's rates in each role there.

    Units are tokens per second: uncached prompt tokens of prefill replicas; for replicas that
    generate, output tokens at the target ITL. Where both are done, answers wait for a step that
    reads prompts for `prompt_step_s` at most.
    """

    uncached_per_s: float
    output_per_s: float
    prefill_rate: float
    decode_rate: float
    prompt_step_s: float = inf


def prefill_share(policy: PlacementPolicy, mix: TokenMix, counts: RoleCounts) -> float:
    """Return the share of a PoP's replicas that should only prefill; 0 for unified replicas."""
    fixed = _FIXED.fullmatch(policy.roles)
    if fixed is not None:
        prefill, decode = int(fixed[1]), int(fixed[2])
        return prefill / (prefill + decode)
    if policy.roles == AUTO_ROLES:
        return 0.0 if has_short_steps(policy, mix, counts) else _auto_share(mix, counts)
    return policy.prefill_share


def has_short_steps(policy: PlacementPolicy, mix: TokenMix, counts: RoleCounts) -> bool:
    """Return whether pauses between tokens stay within the target without roles, in `auto`."""
    if policy.roles != AUTO_ROLES or policy.prefill_devices or policy.decode_devices:
        return False
    return mix.prompt_step_s <= ITL_TARGET_S * (STEP_MARGIN if counts.prefill else 1.0)


def generating_share(policy: PlacementPolicy) -> float:
    """Return the share of a PoP's replicas that generate where the policy fixes it; else 1.

    With `auto` the share follows from the demand, so that output never lacks replicas.
    """
    if policy.roles == AUTO_ROLES:
        return 1.0
    no_demand = TokenMix(uncached_per_s=0.0, output_per_s=0.0, prefill_rate=0.0, decode_rate=0.0)
    return 1.0 - prefill_share(policy, no_demand, RoleCounts())


def role_of_next(policy: PlacementPolicy, mix: TokenMix, counts: RoleCounts) -> Role:
    """Return the role of one more replica in a PoP that has `counts`."""
    share = prefill_share(policy, mix, counts)
    if policy.roles == AUTO_ROLES:
        total = counts.total + 1
        share = int(share * total + AUTO_ROUNDING) / total
    return next_role(share, counts)


def prefill_wanted(policy: PlacementPolicy, mix: TokenMix, counts: RoleCounts) -> int:
    """Return how many replicas of a PoP should prefill, of the number that it has."""
    total = counts.total
    if total < 2:
        return 0
    if policy.roles != AUTO_ROLES:
        share = prefill_share(policy, mix, counts)
        return min(max(1, round(share * total)), total - 1) if share > 0 else 0
    if not _is_known(mix):
        return counts.prefill
    share = _reading_share(mix)
    if share < _least_share(counts) or has_short_steps(policy, mix, counts):
        return 0
    best = share * total
    fewest = int(max(0.0, best - CHANGE_MARGIN) + AUTO_ROUNDING)
    most = int(best + CHANGE_MARGIN + AUTO_ROUNDING)
    return min(max(counts.prefill, fewest), most, total - 1)


def prefill_bounds(policy: PlacementPolicy, mix: TokenMix, generating: int) -> PrefillBounds:
    """Return how many prefill replicas a PoP needs and can use beside those that generate.

    Between the two numbers nothing changes: the mix is at the border of two ratios. A replica that
    generates may be added to as many prefill replicas as those before it could use.
    """
    share = prefill_share(policy, mix, RoleCounts())
    if generating < 1 or share <= 0:
        return PrefillBounds(0, 0)
    each = share / max(1 - share, ROUNDING)
    is_auto = policy.roles == AUTO_ROLES

    def most_beside(count: int) -> int:
        if is_auto:
            return int(count * each + CHANGE_MARGIN + AUTO_ROUNDING) if count else 0
        return max(1, ceil(count * each - ROUNDING)) if count else 0

    best = generating * each
    least = int(max(0.0, best - CHANGE_MARGIN) + AUTO_ROUNDING if is_auto else best + ROUNDING)
    return PrefillBounds(min(least, most_beside(generating - 1)), most_beside(generating))


def role_change(
    policy: PlacementPolicy,
    mix: TokenMix,
    replicas: Sequence[ReplicaRole],
    may_have: Callable[[ReplicaId, Role], bool] = lambda _, __: True,
) -> RoleChange | None:
    """Return the next change of role among the running replicas of a PoP; None if none is due.

    `may_have` says whether a replica's devices allow a role.
    """
    roles = Counter(replica.role for replica in replicas)
    counts = RoleCounts(
        unified=roles[Role.UNIFIED], prefill=roles[Role.PREFILL], decode=roles[Role.DECODE]
    )
    prefill = prefill_wanted(policy, mix, counts)
    if prefill == counts.prefill:
        return None
    is_more = prefill > counts.prefill
    new_role = Role.PREFILL if is_more else Role.DECODE if prefill else Role.UNIFIED
    # The newest first: the oldest generating replica has the most sessions.
    for replica in sorted(replicas, key=lambda replica: (replica.age_s, replica.replica_id)):
        if (replica.role is Role.PREFILL) != is_more and may_have(replica.replica_id, new_role):
            reason = f"{prefill} of {counts.total} replicas should prefill, {counts.prefill} do"
            return RoleChange(replica.replica_id, new_role, reason)
    return None


def next_role(share: float, counts: RoleCounts) -> Role:
    """Return the role of one more replica in a PoP that has `counts`.

    The first one is unified, and there is always one that generates.
    """
    if share <= 0 or not counts.total:
        return Role.UNIFIED
    total = counts.total + 1
    prefill = min(max(1, round(share * total)), total - 1)
    generating = counts.unified + counts.decode
    return Role.PREFILL if counts.prefill < prefill and generating else Role.DECODE


def _is_known(mix: TokenMix) -> bool:
    """Return whether there is demand, and the rates are measured."""
    if mix.prefill_rate <= 0 or mix.decode_rate <= 0:
        return False
    return mix.uncached_per_s / mix.prefill_rate + mix.output_per_s / mix.decode_rate > 0


def _auto_share(mix: TokenMix, counts: RoleCounts) -> float:
    """Return the share of time that reading prompts takes, or the present share if it is near."""
    if not _is_known(mix):
        return 0.0
    share = _reading_share(mix)
    present = counts.prefill / counts.total if counts.total else 0.0
    if present and abs(share - present) <= HYSTERESIS:
        return present
    return share if share >= _least_share(counts) else 0.0


def _reading_share(mix: TokenMix) -> float:
    """Return the share of replicas' time that reading prompts takes, of a mix that is known."""
    reading = mix.uncached_per_s / mix.prefill_rate
    return reading / (reading + mix.output_per_s / mix.decode_rate)


def _least_share(counts: RoleCounts) -> float:
    """Return the share of time from which on replicas have roles."""
    return AUTO_SHARE_MIN - SHARE_MARGIN if counts.prefill else AUTO_SHARE_MIN
