"""The admin API of deployments: create, change, delete and explain them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.admin import DeploymentBody, DeploymentView, NewDeploymentBody
from isochrone.wire.engines.command_engine import command_problem, lacking_features_of
from isochrone.wire.engines.engine_capabilities import (
    ENGINE_CAPABILITIES,
    EngineEntry,
    capabilities_of,
    lacking_features,
    sleep_problem,
    sleep_problem_on,
    transfer_problem,
    weights_problem,
    with_transfer,
)
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.engines.shared_prompts import drafts_problem
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import DeploymentId, ModelId, PopId
from isochrone.wire.kv.kv_store import sharing_problem, store_use, uses_kv_store
from isochrone.wire.models.model import (
    AUTO_ROLES,
    KIND_FEATURES,
    UNIFIED_ROLES,
    Deployment,
    EngineSettings,
    PlacementPolicy,
)
from isochrone.wire.peers.routes import Pop
from scheduler.api.admin.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.decide.placement import policy_contradiction, residency_allows
from scheduler.decide.whatif import Explanation
from scheduler.store import catalogue, deployments
from scheduler.store.cluster import read_pops
from scheduler.store.fleet.nodes import read_device_classes
from scheduler.store.lease import read_acting_for_s
from scheduler.store.rollouts import conflicts_with_rollout

ADD_MODEL: Final = "`isochrone models list` shows all, `isochrone models add` adds one"


async def list_deployments(request: AdminRequest) -> Page:
    """List deployments."""
    rows = await deployments.list_deployments(request.connection, request.after, request.limit + 1)
    return request.page([_with_unmet(request, row) for row in rows], lambda row: row.deployment_id)


async def get_deployment(request: AdminRequest) -> DeploymentView:
    """Read one deployment."""
    return _with_unmet(request, await require_deployment(request))


async def require_deployment(request: AdminRequest) -> DeploymentView:
    """Return the deployment that the path names, or raise the 404 error."""
    return require_found(
        await deployments.get_deployment(request.connection, request.name),
        "deployment",
        request.name,
    )


async def require_same_kind(
    request: AdminRequest, deployment: DeploymentView, model_id: str
) -> None:
    """Raise ApiError 409 if clients of the deployment could not use the model `model_id`."""
    before = await catalogue.get_model(request.connection, deployment.model_id)
    after = await catalogue.get_model(request.connection, model_id)
    if before is not None and after is not None and before.model.kind != after.model.kind:
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot serve {model_id} as {deployment.deployment_id}: it is a model of kind"
            f" {after.model.kind!r}, and clients of this deployment use one of kind"
            f" {before.model.kind!r}; make a deployment of its own",
            param="model_id",
        )


async def require_served_model(
    request: AdminRequest, model_id: str, engine: EngineSettings
) -> None:
    """Raise ApiError 400 if an engine does not serve models of the kind of `model_id`, or cannot
    read its weights."""
    found = await catalogue.get_model(request.connection, model_id)
    if found is not None and KIND_FEATURES.get(found.model.kind) in lacking_features_of(engine):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot deploy {model_id} with {engine.driver}: it is a model of kind"
            f" {found.model.kind!r}, which this engine does not serve; `isochrone engines` lists"
            " those that do",
            param="engine.driver",
        )
    paths = [file.path for file in found.model.artifact.files] if found is not None else []
    if problem := weights_problem(engine.driver, paths):
        reason = f"cannot deploy {model_id} with {engine.driver}: {problem}"
        raise ApiError(ErrorCode.INVALID_REQUEST, reason, param="engine.driver")


def _with_unmet(request: AdminRequest, view: DeploymentView) -> DeploymentView:
    unmet = tuple(
        unmet.reason
        for unmet in request.context.placement.unmet
        if unmet.deployment_id == view.deployment_id
    )
    return msgspec.structs.replace(view, unmet=unmet)


async def create_deployment(request: AdminRequest) -> DeploymentView:
    """Create a deployment of a model."""
    body: NewDeploymentBody = request.body
    deployment = await _validated(request, body, body.deployment_id, None)
    await _require_replacement(request, deployment, None)
    await require_served_model(request, body.model_id, body.engine)
    if not await deployments.add_deployment(request.connection, deployment):
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot create {body.deployment_id}: the id or the name {deployment.name} is taken;"
            " give another id, or with `--name` a name that is not the model's",
        )
    after = await deployments.get_deployment(request.connection, body.deployment_id)
    await request.record_change("deployment.create", body.deployment_id, after=after)
    return require_found(after, "deployment", body.deployment_id)


async def put_deployment(request: AdminRequest) -> DeploymentView:
    """Change a deployment.

    Another model, engine, overcommit or awake_min makes a new version, which replaces the old.
    """
    name = request.name
    await deployments.lock_deployment(request.connection, name)
    before = await require_deployment(request)
    body: DeploymentBody = request.body
    deployment = await _validated(request, body, name, before)
    await _require_replacement(request, deployment, before)
    await require_same_kind(request, before, body.model_id)
    await require_served_model(request, body.model_id, body.engine)
    if await conflicts_with_rollout(request.connection, deployment):
        reason = f"cannot change {name}: a rollout of it is active; abort it first"
        raise ApiError(ErrorCode.CONFLICT, reason)
    if not await deployments.change_deployment(request.connection, deployment, request.etag):
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot change {name}: the name {deployment.name} is taken"
        )
    after = await require_deployment(request)
    await request.record_change("deployment.put", name, before=before, after=after)
    return after


async def delete_deployment(request: AdminRequest) -> None:
    """Delete a deployment; its replicas drain."""
    before = await require_deployment(request)
    await deployments.delete_deployment(request.connection, request.name, request.etag)
    await request.record_change("deployment.delete", request.name, before=before)


async def explain_deployment(request: AdminRequest) -> Explanation:
    """Explain where a deployment runs, where it cannot, and what would help."""
    lease = request.context.lease
    # A standby hears no nodes: it explains what the acting scheduler would decide.
    acting_for_s = (
        lease.acting_for_s if lease.is_acting else await read_acting_for_s(request.connection)
    )
    if acting_for_s is None:
        raise ApiError(
            ErrorCode.UNAVAILABLE, "cannot explain: no scheduler acts now", retry_after_s=5
        )
    observed = request.context.heartbeats.observed()
    observed = msgspec.structs.replace(observed, acting_for_s=acting_for_s)
    explained = await request.context.planner.explain(observed, DeploymentId(request.name))
    return require_found(explained, "deployment", request.name)


async def list_engines(request: AdminRequest) -> Page:
    """List the engines that a deployment can name, with what each can do."""
    entries = [
        EngineEntry(
            driver=name,
            capabilities=capabilities_of(name),
            lacks=lacking_features(name),
            options=tuple(sorted(ENGINE_OPTIONS[name].names)),
        )
        for name in sorted(ENGINE_OPTIONS)
        if name > (request.after or "")
    ]
    return request.page(entries[: request.limit + 1], lambda entry: entry.driver)


DEPLOYMENT_ENDPOINTS: Final = (
    Endpoint(
        "GET", "/v1/engines", list_engines, "List engines and what each can do", EngineEntry,
        is_list=True,
    ),
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
        "DELETE", "/v1/deployments/{deployment_id}", delete_deployment, "Delete a deployment",
        status=204,
    ),
    Endpoint(
        "GET", "/v1/deployments/{deployment_id}/explain", explain_deployment,
        "Explain where a deployment runs", Explanation,
    ),
)  # fmt: skip


class EngineProblem(NamedTuple):
    """A setting of an engine that no node can satisfy, and why."""

    field: str
    reason: str


def engine_problem(engine: EngineSettings) -> EngineProblem | None:
    """Return what is wrong with an engine's settings on any node; None if nothing is."""
    if engine.driver not in ENGINE_OPTIONS:
        known = ", ".join(sorted(ENGINE_OPTIONS))
        return EngineProblem("driver", f"there is no driver {engine.driver!r}; use one of {known}")
    if engine.nodes > 1 and not capabilities_of(engine.driver).over_nodes:
        able = (
            name for name, capabilities in ENGINE_CAPABILITIES.items() if capabilities.over_nodes
        )
        known = ", ".join(sorted(able))
        return EngineProblem(
            "nodes", f"{engine.driver} cannot run over several nodes; only {known} can"
        )
    if engine.devices % engine.nodes:
        reason = f"{engine.devices} devices cannot be divided evenly over {engine.nodes} nodes"
        return EngineProblem("nodes", reason)
    reason = ENGINE_OPTIONS[engine.driver].problem(engine.options)
    reason = reason or command_problem(engine) or drafts_problem(engine)
    return EngineProblem("options", f"{engine.driver}: {reason}") if reason else None


async def _validated(
    request: AdminRequest, body: DeploymentBody, deployment_id: str, before: DeploymentView | None
) -> Deployment:
    problem = engine_problem(body.engine)
    if problem is not None:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot deploy: {problem.reason}",
            param=f"engine.{problem.field}",
        )
    if await catalogue.get_model(request.connection, body.model_id) is None:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot deploy: no model {body.model_id}; {ADD_MODEL}",
            param="model_id",
        )
    asleep = sleep_problem(body.engine) if body.policy.overcommit > 1 else ""
    if asleep:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot deploy with overcommit {body.policy.overcommit:g}: {asleep}",
            param="policy.overcommit",
        )
    reason = roles_problem(body.engine, body.policy)
    pops = await read_pops(request.connection)
    reason = reason or _policy_problem(body.policy, pops)
    reason = reason or pair_problem(body.engine, body.policy, pops)
    # Checked only if the change concerns devices: nodes may have left since the last one.
    if not reason and (
        before is None or (body.engine, body.policy) != (before.engine, before.policy)
    ):
        classes = await read_device_classes(request.connection)
        reason = device_problem(body.engine, body.policy, pops, classes)
    if reason:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot deploy: {reason}", param="policy")
    has_roles = body.policy.roles != UNIFIED_ROLES
    return Deployment(
        deployment_id=DeploymentId(deployment_id),
        name=body.name or body.model_id,
        model_id=ModelId(body.model_id),
        engine=with_transfer(body.engine) if has_roles else body.engine,
        policy=body.policy,
        deprecation=body.deprecation,
    )


async def _require_replacement(
    request: AdminRequest, deployment: Deployment, before: DeploymentView | None
) -> None:
    """Raise ApiError unless a newly named replacement is the name of another deployment.

    One that was deleted since stands in the way of no other change.
    """
    replacement = deployment.deprecation.replacement if deployment.deprecation else ""
    was = before.deprecation.replacement if before and before.deprecation else ""
    if not replacement or replacement == was:
        return
    found = await deployments.get_deployment_by_name(request.connection, replacement)
    if found is None or found.deployment_id == deployment.deployment_id:
        reason = "it is the deployment itself" if found else "no deployment has this name"
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot name {replacement!r} as the replacement: {reason};"
            " `isochrone deployments list` shows the names",
            param="deprecation.replacement",
        )


def roles_problem(engine: EngineSettings, policy: PlacementPolicy) -> str:
    """Return why replicas of this engine cannot have roles of their own; empty if they can."""
    capabilities = capabilities_of(engine.driver)
    if policy.prefill_share:
        return (
            "prefill_share is of an earlier release: set it to 0, and roles to auto or to a ratio"
            " such as prefill=1,decode=2"
        )
    if (policy.prefill_devices or policy.decode_devices) and policy.roles == UNIFIED_ROLES:
        return (
            "prefill_devices and decode_devices are of roles: set roles to auto, or to a ratio such"
            " as prefill=1,decode=2"
        )
    if reason := sharing_problem(engine):
        return reason
    if uses_kv_store(engine) and policy.roles != UNIFIED_ROLES:
        return f"{store_use(engine)} needs replicas without roles: set roles to unified"
    if policy.roles == UNIFIED_ROLES:
        return transfer_problem(engine)
    if policy.roles != AUTO_ROLES and policy.replicas_max == 1:
        return (
            f"roles {policy.roles!r} need two replicas in a PoP, and replicas_max is 1: raise it,"
            " or set roles to unified"
        )
    known = ", ".join(name for name, able in ENGINE_CAPABILITIES.items() if able.sends_kv)
    if not capabilities.sends_kv:
        return (
            f"roles {policy.roles!r} need an engine that sends the KV of prompts to another:"
            f" {engine.driver} does not, {known} do"
        )
    if capabilities.fixed_roles and policy.roles == AUTO_ROLES:
        return (
            f"roles 'auto' need an engine whose running replicas change their roles:"
            f" {engine.driver} does not; give a ratio such as prefill=1,decode=2"
        )
    return transfer_problem(with_transfer(engine))


def pair_problem(engine: EngineSettings, policy: PlacementPolicy, pops: Sequence[Pop]) -> str:
    """Return why a replica could be without one of the other role, which it cannot do without."""
    if policy.roles == UNIFIED_ROLES or not capabilities_of(engine.driver).needs_prefill:
        return ""
    places = sum(residency_allows(policy, pop) for pop in pops)
    if policy.replicas_min >= 2 and places == 1:
        return ""
    return (
        f"roles of {engine.driver} need both in each PoP at all times: allow one PoP and set"
        f" replicas_min to 2 or more ({places} PoPs and {policy.replicas_min} now)"
    )


def device_problem(
    engine: EngineSettings,
    policy: PlacementPolicy,
    pops: Sequence[Pop],
    classes: Mapping[PopId, Collection[str]],
) -> str:
    """Return why no device of the fleet could ever hold a replica; "" if one could.

    `classes` are the device classes of each PoP's nodes. A deployment may come before the nodes for
    it: while its PoPs have none, nothing is refused.
    """
    if policy.overcommit <= 1:
        return ""
    allowed = [pop.pop for pop in pops if residency_allows(policy, pop)]
    problems = {sleep_problem_on(engine, name) for pop in allowed for name in classes.get(pop, ())}
    if not problems or "" in problems:
        return ""
    return f"{min(problems)}; the nodes of the PoPs that it allows have no other device"


def _policy_problem(policy: PlacementPolicy, pops: Sequence[Pop]) -> str:
    """Return why no fleet with these PoPs can satisfy a policy; empty if one can."""
    if len(policy.keep_warm) > policy.replicas_max:
        return f"keep_warm names more PoPs than replicas_max {policy.replicas_max}"
    if policy.awake_min and policy.overcommit == 1:
        return (
            f"awake_min {policy.awake_min} needs an overcommit above 1: without, no replica sleeps;"
            " set overcommit, or awake_min to 0"
        )
    known = {str(pop.pop) for pop in pops} | {pop.country for pop in pops}
    for name in (*policy.allow, *policy.deny):
        if name not in known:
            field = "allow" if name in policy.allow else "deny"
            return f"{field} names {name!r}, which is neither a PoP nor a PoP's country"
    residents = [pop.pop for pop in pops if residency_allows(policy, pop)]
    return policy_contradiction(policy, [pop.pop for pop in pops], residents)
