"""Deployments: wished for, changed, ended, and explained."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.admin import DeploymentBody, DeploymentView, NewDeploymentBody
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.model import Deployment, EngineSettings, Policy
from isochrone.wire.routes import Pop
from scheduler.api.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.decide.explain import Explanation
from scheduler.decide.feasible import allowed, contradiction
from scheduler.store import catalogue, deployments
from scheduler.store.cluster import read_pops
from scheduler.store.lease import read_acting_for_s
from scheduler.store.rollouts import conflicts_with_rollout

DRIVERS: Final = frozenset({"embedded", "mock", "vllm", "sglang", "tensorrt_llm"})
OVER_NODES: Final = frozenset({"embedded", "vllm", "sglang"})


async def list_deployments(call: AdminRequest) -> Page:
    """Deployments."""
    rows = await deployments.list_deployments(call.connection, call.after, call.limit + 1)
    return call.page([_with_unmet(call, row) for row in rows], lambda row: row.deployment_id)


async def get_deployment(call: AdminRequest) -> DeploymentView:
    """One deployment."""
    return _with_unmet(call, await require_deployment(call))


async def require_deployment(call: AdminRequest) -> DeploymentView:
    """Return the deployment that the path names."""
    return require_found(
        await deployments.get_deployment(call.connection, call.name), "deployment", call.name
    )


def _with_unmet(call: AdminRequest, view: DeploymentView) -> DeploymentView:
    unmet = tuple(reason for name, reason in call.acting.unmet if name == view.deployment_id)
    return msgspec.structs.replace(view, unmet=unmet)


async def create_deployment(call: AdminRequest) -> DeploymentView:
    """Wish that a model be served."""
    body: NewDeploymentBody = call.body
    deployment = await _checked(call, body, body.deployment_id)
    if not await deployments.add_deployment(call.connection, deployment):
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot create {body.deployment_id}: this id or the name {deployment.name} is taken",
        )
    after = await deployments.get_deployment(call.connection, body.deployment_id)
    await call.changed("deployment.create", body.deployment_id, after=after)
    return require_found(after, "deployment", body.deployment_id)


async def put_deployment(call: AdminRequest) -> DeploymentView:
    """Change a deployment; another model or engine is a new version, rolled out by and by."""
    name = call.name
    await deployments.lock_deployment(call.connection, name)
    before = await require_deployment(call)
    body: DeploymentBody = call.body
    deployment = await _checked(call, body, name)
    if await conflicts_with_rollout(call.connection, deployment):
        words = f"cannot change {name}: a rollout of it is on its way; abort it first"
        raise ApiError(ErrorCode.CONFLICT, words)
    if not await deployments.change_deployment(call.connection, deployment, call.etag):
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot change {name}: the name {deployment.name} is taken"
        )
    after = await require_deployment(call)
    await call.changed("deployment.put", name, before=before, after=after)
    return after


async def delete_deployment(call: AdminRequest) -> None:
    """End a deployment: its replicas drain."""
    before = await require_deployment(call)
    await deployments.delete_deployment(call.connection, call.name, call.etag)
    await call.changed("deployment.delete", call.name, before=before)


async def explain_deployment(call: AdminRequest) -> Explanation:
    """Why here, why not there, what would help."""
    acting = call.acting
    # A standby has heard nobody and decides nothing: it answers for the one that acts.
    acting_for_s = (
        acting.acting_for_s if acting.is_acting else await read_acting_for_s(call.connection)
    )
    if acting_for_s is None:
        raise ApiError(
            ErrorCode.UNAVAILABLE, "cannot explain: no scheduler acts now", retry_after_s=5
        )
    heard = msgspec.structs.replace(acting.heard(), acting_for_s=acting_for_s)
    explained = await acting.planner.explain(heard, DeploymentId(call.name))
    return require_found(explained, "deployment", call.name)


DEPLOYMENT_ENDPOINTS: Final = (
    Endpoint(
        "GET", "/v1/deployments", list_deployments, "List deployments", DeploymentView, is_list=True
    ),
    Endpoint(
        "POST", "/v1/deployments", create_deployment, "Create a deployment", DeploymentView,
        NewDeploymentBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/deployments/{deployment_id}", get_deployment, "Read a deployment",
        DeploymentView,
    ),
    Endpoint(
        "PUT", "/v1/deployments/{deployment_id}", put_deployment, "Change a deployment",
        DeploymentView, DeploymentBody,
    ),
    Endpoint(
        "DELETE", "/v1/deployments/{deployment_id}", delete_deployment, "End a deployment",
        status=204,
    ),
    Endpoint(
        "GET", "/v1/deployments/{deployment_id}/explain", explain_deployment,
        "Why here, why not there", Explanation,
    ),
)  # fmt: skip


class EngineProblem(NamedTuple):
    """Which of an engine's settings no node can be given, and why."""

    field: str
    words: str


def engine_problem(engine: EngineSettings) -> EngineProblem | None:
    """Return what is wrong with an engine's settings, whatever the fleet."""
    if engine.driver not in DRIVERS:
        known = ", ".join(sorted(DRIVERS))
        return EngineProblem("driver", f"there is no driver {engine.driver!r}: one of {known}")
    if engine.nodes > 1 and engine.driver not in OVER_NODES:
        known = ", ".join(sorted(OVER_NODES))
        return EngineProblem("nodes", f"{engine.driver} cannot be spread over nodes: only {known}")
    if engine.devices % engine.nodes:
        words = f"{engine.devices} devices over {engine.nodes} nodes: each must have as many"
        return EngineProblem("nodes", words)
    return None


async def _checked(call: AdminRequest, body: DeploymentBody, deployment_id: str) -> Deployment:
    wrong = engine_problem(body.engine)
    if wrong is not None:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot deploy: {wrong.words}",
            param=f"engine.{wrong.field}",
        )
    if await catalogue.get_model(call.connection, body.model_id) is None:
        raise ApiError(
            ErrorCode.NOT_FOUND, f"cannot deploy: no model {body.model_id}", param="model_id"
        )
    problem = _policy_problem(body.policy, await read_pops(call.connection))
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot deploy: {problem}", param="policy")
    return Deployment(
        deployment_id=DeploymentId(deployment_id),
        name=body.name or body.model_id,
        model_id=ModelId(body.model_id),
        engine=body.engine,
        policy=body.policy,
    )


def _policy_problem(policy: Policy, pops: Sequence[Pop]) -> str:
    if len(policy.keep_warm) > policy.replicas_max:
        return f"keep_warm names more PoPs than replicas_max {policy.replicas_max}"
    known = {str(pop.pop) for pop in pops} | {pop.country for pop in pops}
    for name in (*policy.allow, *policy.deny):
        if name not in known:
            field = "allow" if name in policy.allow else "deny"
            return f"{field} names {name!r}, which is no PoP and no PoP's country"
    residents = [pop.pop for pop in pops if allowed(policy, pop)]
    return contradiction(policy, [pop.pop for pop in pops], residents)
