"""The admin API of rollouts: begin one, see how it stands, hold it, go on, call it off."""

import secrets
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.rollout import RolloutBody, RolloutSpec, RolloutView
from scheduler.api.deployments import engine_problem, require_deployment
from scheduler.api.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.decide.rollout import ON_ITS_WAY, Event, NotNow, Rollout, after, problem_of
from scheduler.decide.trial import compare
from scheduler.store import catalogue, deployments, rollouts
from scheduler.store.cluster import read_pops


async def create_rollout(call: AdminRequest) -> RolloutView:
    """Begin to bring a new version."""
    name = call.name
    body: RolloutBody = call.body
    await deployments.lock_deployment(call.connection, name)
    deployment = await require_deployment(call)
    spec = RolloutSpec(
        model_id=ModelId(body.model_id or deployment.model_id),
        engine=body.engine or deployment.engine,
        steps=body.steps,
        bounds=body.bounds,
    )
    if await catalogue.get_model(call.connection, spec.model_id) is None:
        words = f"cannot roll out: no model {spec.model_id}"
        raise ApiError(ErrorCode.NOT_FOUND, words, param="model_id")
    problem = await _problem(call, spec)
    if (spec.model_id, spec.engine) == (deployment.model_id, deployment.engine):
        problem = "the model and the engine are those that already serve"
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot roll out: {problem}")
    rollout = Rollout(
        rollout_id=f"{name}.{secrets.token_hex(4)}",
        deployment_id=DeploymentId(name),
        from_version=deployment.version,
        to_version=await deployments.next_version(call.connection, name),
        spec=spec,
    )
    if not await rollouts.add_rollout(call.connection, rollout):
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot roll out: a rollout of {name} is on its way; abort it first",
        )
    await call.changed("rollout.create", name, after=rollout)
    return await _view(call, rollout)


async def list_rollouts(call: AdminRequest) -> Page:
    """Rollouts, of one deployment or of all."""
    rows = await rollouts.list_rollouts(
        call.connection, call.after, call.limit + 1, call.query("deployment_id")
    )
    views = [await _view(call, row) for row in rows]
    return call.page(views, lambda row: row.rollout_id)


async def get_rollout(call: AdminRequest) -> RolloutView:
    """One rollout."""
    return await _view(call, await _found(call))


async def pause_rollout(call: AdminRequest) -> RolloutView:
    """Hold a rollout at its step; harm still reverts it."""
    return await _happened(call, Event.PAUSE_ASKED)


async def resume_rollout(call: AdminRequest) -> RolloutView:
    """Go on; the step's time begins anew."""
    return await _happened(call, Event.RESUME_ASKED)


async def abort_rollout(call: AdminRequest) -> RolloutView:
    """Call it off: every request goes to the old version."""
    return await _happened(call, Event.ABORT_ASKED)


ROLLOUT_ENDPOINTS: Final = (
    Endpoint(
        "POST", "/v1/deployments/{deployment_id}/rollouts", create_rollout,
        "Bring a new version by steps", RolloutView, RolloutBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/rollouts", list_rollouts, "List rollouts", RolloutView, is_list=True,
        query=("deployment_id",),
    ),
    Endpoint("GET", "/v1/rollouts/{rollout_id}", get_rollout, "Read a rollout", RolloutView),
    Endpoint("POST", "/v1/rollouts/{rollout_id}/pause", pause_rollout, "Hold it", RolloutView),
    Endpoint("POST", "/v1/rollouts/{rollout_id}/resume", resume_rollout, "Go on", RolloutView),
    Endpoint("POST", "/v1/rollouts/{rollout_id}/abort", abort_rollout, "Call it off", RolloutView),
)  # fmt: skip


async def _happened(call: AdminRequest, event: Event) -> RolloutView:
    rollout = await _found(call)
    try:
        new = after(rollout, event, "asked by an operator")
    except NotNow as error:
        raise ApiError(ErrorCode.CONFLICT, str(error)) from error
    if not await rollouts.write_rollout(call.connection, rollout, new):
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot change {rollout.rollout_id}: it has just changed"
        )
    await call.record(f"rollout.{event.value}", rollout.deployment_id, before=rollout, after=new)
    return await _view(call, new)


async def _problem(call: AdminRequest, spec: RolloutSpec) -> str:
    wrong = engine_problem(spec.engine)
    if wrong is not None:
        return wrong.words
    known = {pop.pop for pop in await read_pops(call.connection)}
    unknown = {pop for step in spec.steps for pop in step.pops} - known
    if unknown:
        return f"there is no PoP {', '.join(sorted(unknown))}"
    return problem_of(spec.steps)


async def _found(call: AdminRequest) -> Rollout:
    return require_found(
        await rollouts.get_rollout(call.connection, call.name), "rollout", call.name
    )


async def _view(call: AdminRequest, rollout: Rollout) -> RolloutView:
    seen: tuple[str, ...] = ()
    if rollout.state in ON_ITS_WAY:
        strata = await rollouts.read_strata(call.connection, rollout)
        attempts = sum(stratum.new.attempts for stratum in strata)
        shown = compare(strata, rollout.spec.bounds)
        seen = (f"attempts: {attempts}", *(difference.words() for difference in shown))
    return msgspec.convert(
        {**msgspec.structs.asdict(rollout), "seen": seen}, RolloutView, from_attributes=True
    )
