"""The admin API of rollouts: create, read, pause, resume and abort them."""

import secrets
from typing import Final

import msgspec

from isochrone.wire.engines.engine_capabilities import sleep_problem, with_transfer
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.models.model import UNIFIED_ROLES, PlacementPolicy
from isochrone.wire.peers.rollout import RolloutBody, RolloutSpec, RolloutView
from scheduler.api.admin.deployments import (
    ADD_MODEL,
    device_problem,
    engine_problem,
    pair_problem,
    require_deployment,
    require_same_kind,
    require_served_model,
    roles_problem,
)
from scheduler.api.admin.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.decide.rollout import (
    IN_PROGRESS,
    InvalidRolloutEvent,
    Rollout,
    RolloutEvent,
    apply_event,
    compare_arms,
    steps_problem,
)
from scheduler.store import catalogue, deployments, rollouts
from scheduler.store.cluster import read_pops
from scheduler.store.fleet.nodes import read_device_classes


async def create_rollout(request: AdminRequest) -> RolloutView:
    """Begin to roll out a new version of a deployment."""
    name = request.name
    body: RolloutBody = request.body
    await deployments.lock_deployment(request.connection, name)
    deployment = await require_deployment(request)
    engine = body.engine or deployment.engine
    if deployment.policy.roles != UNIFIED_ROLES:
        engine = with_transfer(engine)
    spec = RolloutSpec(
        model_id=ModelId(body.model_id or deployment.model_id),
        engine=engine,
        steps=body.steps,
        bounds=body.bounds,
    )
    if await catalogue.get_model(request.connection, spec.model_id) is None:
        reason = f"cannot roll out: no model {spec.model_id}; {ADD_MODEL}"
        raise ApiError(ErrorCode.NOT_FOUND, reason, param="model_id")
    await require_same_kind(request, deployment, spec.model_id)
    await require_served_model(request, spec.model_id, spec.engine)
    problem = await _problem(request, spec, deployment.policy)
    if not problem and deployment.policy.overcommit > 1:
        problem = sleep_problem(spec.engine)
    if (spec.model_id, spec.engine) == (deployment.model_id, deployment.engine):
        problem = "this model and engine are already deployed"
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot roll out: {problem}")
    rollout = Rollout(
        rollout_id=f"{name}.{secrets.token_hex(4)}",
        deployment_id=DeploymentId(name),
        from_version=deployment.version,
        to_version=await deployments.next_version(request.connection, name),
        spec=spec,
    )
    if not await rollouts.add_rollout(request.connection, rollout):
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot roll out: a rollout of {name} is active; abort it first",
        )
    await request.record_change("rollout.create", name, after=rollout)
    return await _view(request, rollout)


async def list_rollouts(request: AdminRequest) -> Page:
    """List rollouts of one deployment or of all."""
    rows = await rollouts.list_rollouts(
        request.connection, request.after, request.limit + 1, request.query("deployment_id")
    )
    views = [await _view(request, row) for row in rows]
    return request.page(views, lambda row: row.rollout_id)


async def get_rollout(request: AdminRequest) -> RolloutView:
    """Read one rollout."""
    return await _view(request, await _require_rollout(request))


async def pause_rollout(request: AdminRequest) -> RolloutView:
    """Pause a rollout at its step. A regression still reverts it."""
    return await _apply(request, RolloutEvent.PAUSE)


async def resume_rollout(request: AdminRequest) -> RolloutView:
    """Resume a rollout. The minimum time of its step starts again."""
    return await _apply(request, RolloutEvent.RESUME)


async def abort_rollout(request: AdminRequest) -> RolloutView:
    """Abort a rollout: all requests go to the old version."""
    return await _apply(request, RolloutEvent.ABORT)


ROLLOUT_ENDPOINTS: Final = (
    Endpoint(
        "POST", "/v1/deployments/{deployment_id}/rollouts", create_rollout,
        "Roll out a new version", RolloutView, RolloutBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/rollouts", list_rollouts, "List rollouts", RolloutView, is_list=True,
        query=("deployment_id",),
    ),
    Endpoint("GET", "/v1/rollouts/{rollout_id}", get_rollout, "Read a rollout", RolloutView),
    Endpoint(
        "POST", "/v1/rollouts/{rollout_id}/pause", pause_rollout, "Pause a rollout", RolloutView
    ),
    Endpoint(
        "POST", "/v1/rollouts/{rollout_id}/resume", resume_rollout, "Resume a rollout", RolloutView
    ),
    Endpoint(
        "POST", "/v1/rollouts/{rollout_id}/abort", abort_rollout, "Abort a rollout", RolloutView
    ),
)  # fmt: skip


async def _apply(request: AdminRequest, event: RolloutEvent) -> RolloutView:
    rollout = await _require_rollout(request)
    try:
        new = apply_event(rollout, event, "asked by an operator")
    except InvalidRolloutEvent as error:
        raise ApiError(ErrorCode.CONFLICT, str(error)) from error
    if not await rollouts.write_rollout(request.connection, rollout, new):
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot change {rollout.rollout_id}: it has just changed"
        )
    await request.record(f"rollout.{event.value}", rollout.deployment_id, before=rollout, after=new)
    return await _view(request, new)


async def _problem(request: AdminRequest, spec: RolloutSpec, policy: PlacementPolicy) -> str:
    problem = engine_problem(spec.engine)
    if problem is not None:
        return problem.reason
    pops = await read_pops(request.connection)
    unknown = {pop for step in spec.steps for pop in step.pops} - {pop.pop for pop in pops}
    if unknown:
        return f"there is no PoP {', '.join(sorted(unknown))}"
    reason = roles_problem(spec.engine, policy) or pair_problem(spec.engine, policy, pops)
    classes = await read_device_classes(request.connection)
    reason = reason or device_problem(spec.engine, policy, pops, classes)
    return reason or steps_problem(spec.steps)


async def _require_rollout(request: AdminRequest) -> Rollout:
    return require_found(
        await rollouts.get_rollout(request.connection, request.name), "rollout", request.name
    )


async def _view(request: AdminRequest, rollout: Rollout) -> RolloutView:
    seen: tuple[str, ...] = ()
    if rollout.state in IN_PROGRESS:
        strata = await rollouts.read_strata(request.connection, rollout)
        attempts = sum(stratum.new.attempts for stratum in strata)
        shown = compare_arms(strata, rollout.spec.bounds)
        seen = (f"attempts: {attempts}", *(difference.words() for difference in shown))
    return msgspec.convert(
        {**msgspec.structs.asdict(rollout), "seen": seen}, RolloutView, from_attributes=True
    )
