"""What cannot be met, in words an operator can act on: each no with its numbers."""

from collections.abc import Iterator

from isochrone.wire.model import Deployment, EngineSettings, Model
from scheduler.decide.capacity import CannotFit, capacity, fits_on
from scheduler.decide.cluster import Unmet
from scheduler.decide.device_classes import DeviceClass, class_of
from scheduler.decide.feasible import Refused, seat_on
from scheduler.decide.ground import Ground
from scheduler.decide.wish import Wish

SHOWN_MAX = 6
UNSERVED_SHARE = 0.02


def contradiction(ground: Ground, deployment: Deployment, model: Model) -> str:
    """Say what in a deployment can never be met by this fleet, whatever is free; "" if nothing."""
    policy = deployment.policy
    if policy.replicas_min > policy.replicas_max:
        return (
            f"cannot keep at least {policy.replicas_min} and at most {policy.replicas_max} "
            f"replicas: raise the maximum or lower the minimum; {policy.replicas_max} are kept"
        )
    unknown = [pop for pop in policy.keep_warm if pop not in ground.pops]
    if unknown:
        return f"cannot keep {unknown[0]} warm: there is no such PoP"
    residents = ground.residents(policy)
    if ground.pops and not residents:
        return (
            f"cannot live anywhere: allow {list(policy.allow)} and deny {list(policy.deny)} "
            "together leave no PoP"
        )
    barred = [pop for pop in policy.keep_warm if pop not in residents]
    if barred:
        return f"cannot keep {barred[0]} warm: residency does not allow it"
    return ""


def unmet_in(ground: Ground, wish: Wish) -> Iterator[Unmet]:
    """Return what a wish still lacks at the end of a plan, with what each node said."""
    policy, pops = wish.deployment.policy, wish.pops()
    room_left = len(wish.seats) < wish.most
    for pop in sorted(set(policy.keep_warm) & set(ground.pops)):
        if pop not in pops and room_left and pop in ground.residents(policy):
            yield _unmet(ground, wish, f"{pop} is kept warm", pop)
    if len(pops) < wish.least:
        yield _unmet(ground, wish, f"at least {wish.least} replicas are asked for")
    unserved = wish.flow.unserved()
    asked = float(wish.flow.load.sum())
    if wish.is_asked_for and unserved > UNSERVED_SHARE * asked and len(pops) >= wish.least:
        share = f"{100 * unserved / asked:.0f} % of what is asked finds no room"
        if room_left:
            yield _unmet(ground, wish, share)
        else:
            reason = f"{share}: the policy allows {wish.most} replicas; raise the maximum"
            yield Unmet(deployment_id=wish.name, reason=reason)


def _unmet(ground: Ground, wish: Wish, wanted: str, only: str = "") -> Unmet:
    refused = []
    for node in ground.nodes.values():
        if only in ("", node.pop):
            seat = seat_on(
                node,
                pop=ground.pops[node.pop],
                verdict=ground.view.by_node[node.node_id],
                deployment=wish.deployment,
                model=wish.model,
                free=ground.free,
            )
            if isinstance(seat, Refused):
                refused.append(seat)
    said = "; ".join(f"{r.node.node_id}: {r.reason}" for r in refused[:SHOWN_MAX])
    more = f"; and {len(refused) - SHOWN_MAX} more" if len(refused) > SHOWN_MAX else ""
    never = _never(ground, wish)
    reason = f"cannot place a replica ({wanted}): {said or 'there is no node'}{more}"
    return Unmet(deployment_id=wish.name, reason=reason + (f". {never}" if never else ""))


def _never(ground: Ground, wish: Wish) -> str:
    """Say so with the sum if no node of this fleet could hold it, were it empty."""
    if wish.nodes_of:
        return ""
    model, engine = wish.model, wish.deployment.engine
    for name in reversed(ground.device_classes):
        kind = class_of(name)
        if kind is None:
            continue
        answer = capacity(model, engine, kind)
        if isinstance(answer, CannotFit):
            return answer.reason
        most = ground.devices_most(name)
        if most < engine.devices:
            return _too_many(model, engine, kind, most)
    return ""


def _too_many(model: Model, engine: EngineSettings, kind: DeviceClass, most: int) -> str:
    """Say that a replica lives on one node, and what of this class would hold it."""
    least = fits_on(model, engine, kind)
    would = f"set devices to {least}" if least <= most else f"a node of {least} such would hold it"
    return (
        f"cannot seat {model.model_id} on {engine.devices} devices: a replica lives on one node, "
        f"and the largest here has {most} x {kind.name}" + (f"; {would}" if least else "")
    )
