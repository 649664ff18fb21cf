"""The admin API: one table of endpoints, and a function for each."""

from typing import Final, TypeVar

import msgspec

from isochrone.wire.admin import (
    DeploymentBody,
    DeploymentView,
    JoinTokenBody,
    JoinTokenView,
    ModelView,
    NewDeploymentBody,
    NodeView,
    PlacementView,
    PopBody,
    PopView,
    RevocationBody,
    RevocationView,
    RouterView,
    StatusView,
)
from isochrone.wire.artifact import check_artifact
from isochrone.wire.control import PeerRole
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import DeploymentId, ModelId, is_pop
from isochrone.wire.model import Deployment, Model, Policy
from scheduler.api.endpoint import Call, Endpoint, Page
from scheduler.api.identities import (
    create_join_token,
    create_revocation,
    list_join_tokens,
    list_revocations,
    readmit_node,
    revoke_node,
)
from scheduler.api.keys import KEY_ENDPOINTS
from scheduler.decide.explain import Explanation, explain
from scheduler.decide.versions import split
from scheduler.store import catalogue
from scheduler.store.events import Event, list_events
from scheduler.store.identities import revoke
from scheduler.store.lease import read_acting_for_s
from scheduler.store.rollouts import is_overtaken
from scheduler.store.status import read_status

V = TypeVar("V")

DRIVERS: Final = frozenset({"embedded", "mock", "vllm", "sglang", "tensorrt_llm"})
OVER_NODES: Final = frozenset({"embedded", "vllm", "sglang"})


async def status(call: Call) -> StatusView:
    """The fleet in one answer."""
    acting = call.acting
    return await read_status(
        call.connection,
        scheduler=acting.config.name,
        is_acting=acting.is_acting,
        frozen=acting.frozen,
        unmet=acting.unmet,
    )


async def list_pops(call: Call) -> Page:
    """PoPs."""
    rows = await catalogue.list_pops(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.pop)


async def get_pop(call: Call) -> PopView:
    """One PoP."""
    return _found(
        await catalogue.get_pop(call.connection, call.part("pop")), "PoP", call.part("pop")
    )


async def put_pop(call: Call) -> PopView:
    """Make or change a PoP."""
    name = call.part("pop")
    if not is_pop(name):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "cannot name a PoP so: three letters, as `ams`", param="pop"
        )
    before = await catalogue.get_pop(call.connection, name)
    body: PopBody = call.body
    after = await catalogue.put_pop(call.connection, name, body, call.etag)
    await catalogue.touch(call.connection)
    await call.record("pop.put", name, before=before, after=after)
    return after


async def delete_pop(call: Call) -> None:
    """Delete a PoP that nothing is in."""
    await _delete(call, "pop", "pop", call.part("pop"))


async def list_nodes(call: Call) -> Page:
    """Nodes."""
    rows = await catalogue.list_nodes(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.node_id)


async def get_node(call: Call) -> NodeView:
    """One node."""
    name = call.part("node_id")
    return _found(await catalogue.get_node(call.connection, name), "node", name)


async def drain_node(call: Call) -> NodeView:
    """Move a node's replicas elsewhere, then leave it empty."""
    return await _set_draining(call, "node.drain", True)


async def undrain_node(call: Call) -> NodeView:
    """Let a node take replicas again."""
    return await _set_draining(call, "node.undrain", False)


async def delete_node(call: Call) -> None:
    """Forget a node that holds no replica; what it was issued is refused from now on."""
    await _delete(call, "node", "node_id", call.part("node_id"))
    await revoke(call.connection, PeerRole.AGENT, call.part("node_id"), reason="forgotten")
    call.acting.nudge_turn_away()


async def list_routers(call: Call) -> Page:
    """Routers."""
    rows = await catalogue.list_routers(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.router_id)


async def list_models(call: Call) -> Page:
    """Models."""
    rows = await catalogue.list_models(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.model.model_id)


async def get_model(call: Call) -> ModelView:
    """One model."""
    name = call.part("model_id")
    return _found(await catalogue.get_model(call.connection, name), "model", name)


async def put_model(call: Call) -> ModelView:
    """Make or change a catalogue entry."""
    model: Model = call.body
    if model.model_id != call.part("model_id"):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot put: the path names {call.part('model_id')}, the body {model.model_id}",
            param="model_id",
        )
    problem = check_artifact(model.artifact)
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, problem, param="artifact")
    before = await catalogue.get_model(call.connection, model.model_id)
    after = await catalogue.put_model(call.connection, model, call.etag)
    await catalogue.touch(call.connection)
    await call.record("model.put", model.model_id, before=before, after=after)
    return after


async def delete_model(call: Call) -> None:
    """Delete a model that no deployment serves."""
    await _delete(call, "model", "model_id", call.part("model_id"))


async def list_deployments(call: Call) -> Page:
    """Deployments."""
    rows = await catalogue.list_deployments(call.connection, call.after, call.limit + 1)
    unmet = call.acting.unmet
    rows = [
        msgspec.structs.replace(
            row, unmet=tuple(reason for name, reason in unmet if name == row.deployment_id)
        )
        for row in rows
    ]
    return call.page(rows, lambda row: row.deployment_id)


async def get_deployment(call: Call) -> DeploymentView:
    """One deployment."""
    name = call.part("deployment_id")
    found = _found(await catalogue.get_deployment(call.connection, name), "deployment", name)
    unmet = tuple(reason for d, reason in call.acting.unmet if d == name)
    return msgspec.structs.replace(found, unmet=unmet)


async def create_deployment(call: Call) -> DeploymentView:
    """Wish that a model be served."""
    body: NewDeploymentBody = call.body
    deployment = await _checked(call, body, body.deployment_id)
    if not await catalogue.add_deployment(call.connection, deployment):
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot create {body.deployment_id}: this id or the name {deployment.name} is taken",
        )
    await catalogue.touch(call.connection)
    after = await catalogue.get_deployment(call.connection, body.deployment_id)
    await call.record("deployment.create", body.deployment_id, after=after)
    return _found(after, "deployment", body.deployment_id)


async def put_deployment(call: Call) -> DeploymentView:
    """Change a deployment; another model or engine is a new version, rolled out by and by."""
    name = call.part("deployment_id")
    before = _found(await catalogue.get_deployment(call.connection, name), "deployment", name)
    body: DeploymentBody = call.body
    deployment = await _checked(call, body, name)
    if await is_overtaken(call.connection, deployment):
        words = f"cannot change {name}: a rollout of it is on its way; abort it first"
        raise ApiError(ErrorCode.CONFLICT, words)
    if not await catalogue.change_deployment(call.connection, deployment, call.etag):
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot change {name}: the name {deployment.name} is taken"
        )
    await catalogue.touch(call.connection)
    after = await catalogue.get_deployment(call.connection, name)
    await call.record("deployment.put", name, before=before, after=after)
    return _found(after, "deployment", name)


async def delete_deployment(call: Call) -> None:
    """End a deployment: its replicas drain."""
    name = call.part("deployment_id")
    before = _found(await catalogue.get_deployment(call.connection, name), "deployment", name)
    await catalogue.delete_deployment(call.connection, name, call.etag)
    await catalogue.touch(call.connection)
    await call.record("deployment.delete", name, before=before)


async def explain_deployment(call: Call) -> Explanation:
    """Why here, why not there, what would help."""
    name = DeploymentId(call.part("deployment_id"))
    acting = call.acting
    # A standby has heard nobody and decides nothing: it answers for the one that acts.
    acting_for_s = (
        acting.acting_for_s if acting.is_acting else await read_acting_for_s(call.connection)
    )
    if acting_for_s is None:
        raise ApiError(
            ErrorCode.UNAVAILABLE, "cannot explain: no scheduler acts now", retry_after_s=5
        )
    cluster = await acting.picture(call.connection, acting_for_s)
    return _found(explain(split(cluster), name, acting.config.liveness), "deployment", name)


async def list_placements(call: Call) -> Page:
    """Placements, of one deployment or of all."""
    rows = await catalogue.list_placements(
        call.connection, call.after, call.limit + 1, call.query("deployment_id")
    )
    return call.page(rows, lambda row: row.replica_id)


async def events(call: Call) -> Page:
    """What was done, the newest first."""
    before = call.after
    rows = await list_events(
        call.connection,
        before_id=int(before) if before.isdigit() else None,
        limit=call.limit + 1,
        subject=call.query("subject"),
    )
    return call.page(rows, lambda row: str(row.event_id))


ENDPOINTS: Final = (
    Endpoint("GET", "/v1/status", status, "The fleet in one answer", StatusView),
    Endpoint("GET", "/v1/pops", list_pops, "List PoPs", PopView, is_list=True),
    Endpoint("GET", "/v1/pops/{pop}", get_pop, "Read a PoP", PopView),
    Endpoint("PUT", "/v1/pops/{pop}", put_pop, "Make or change a PoP", PopView, PopBody),
    Endpoint("DELETE", "/v1/pops/{pop}", delete_pop, "Delete an empty PoP", status=204),
    Endpoint("GET", "/v1/nodes", list_nodes, "List nodes", NodeView, is_list=True),
    Endpoint("GET", "/v1/nodes/{node_id}", get_node, "Read a node", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/drain", drain_node, "Drain a node", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/undrain", undrain_node, "Use a node again", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/revoke", revoke_node, "Turn a node away", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/readmit", readmit_node, "Let it join again", NodeView),
    Endpoint("DELETE", "/v1/nodes/{node_id}", delete_node, "Forget an empty node", status=204),
    Endpoint(
        "POST", "/v1/join-tokens", create_join_token, "Make a join token", JoinTokenView,
        JoinTokenBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/join-tokens", list_join_tokens, "List join tokens", JoinTokenView, is_list=True
    ),
    Endpoint(
        "GET", "/v1/revocations", list_revocations, "List revocations", RevocationView,
        is_list=True,
    ),
    Endpoint(
        "POST", "/v1/revocations", create_revocation, "Refuse certificates", RevocationView,
        RevocationBody, status=201,
    ),
    Endpoint("GET", "/v1/routers", list_routers, "List routers", RouterView, is_list=True),
    Endpoint("GET", "/v1/models", list_models, "List models", ModelView, is_list=True),
    Endpoint("GET", "/v1/models/{model_id:.+}", get_model, "Read a model", ModelView),
    Endpoint("PUT", "/v1/models/{model_id:.+}", put_model, "Put a model", ModelView, Model),
    Endpoint("DELETE", "/v1/models/{model_id:.+}", delete_model, "Delete a model", status=204),
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
    Endpoint(
        "GET", "/v1/placements", list_placements, "List placements", PlacementView, is_list=True,
        query=("deployment_id",),
    ),
    *KEY_ENDPOINTS,
    Endpoint(
        "GET", "/v1/events", events, "What was done", Event, is_list=True, query=("subject",)
    ),
)  # fmt: skip


async def _set_draining(call: Call, kind: str, draining: bool) -> NodeView:
    name = call.part("node_id")
    before = await catalogue.get_node(call.connection, name)
    if not await catalogue.set_draining(call.connection, name, draining):
        raise _missing("node", name)
    await catalogue.touch(call.connection)
    after = await catalogue.get_node(call.connection, name)
    await call.record(kind, name, before=before, after=after)
    return _found(after, "node", name)


async def _delete(call: Call, table: str, column: str, name: str) -> None:
    if not await catalogue.delete_row(call.connection, table, column, name, call.etag):
        raise _missing(table, name)
    await catalogue.touch(call.connection)
    await call.record(f"{table}.delete", name)


async def _checked(call: Call, body: DeploymentBody, deployment_id: str) -> Deployment:
    if body.engine.driver not in DRIVERS:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use driver {body.engine.driver!r}: one of {', '.join(sorted(DRIVERS))}",
            param="engine.driver",
        )
    if body.engine.nodes > 1 and body.engine.driver not in OVER_NODES:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot spread {body.engine.driver} over nodes: only {', '.join(sorted(OVER_NODES))}",
            param="engine.nodes",
        )
    if body.engine.devices % body.engine.nodes:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot spread {body.engine.devices} devices over {body.engine.nodes} nodes:"
            " each must have as many",
            param="engine.nodes",
        )
    if await catalogue.get_model(call.connection, body.model_id) is None:
        raise ApiError(
            ErrorCode.NOT_FOUND, f"cannot deploy: no model {body.model_id}", param="model_id"
        )
    known = await catalogue.known_countries_and_pops(call.connection)
    problem = _policy_problem(body.policy, known)
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot deploy: {problem}", param="policy")
    return Deployment(
        deployment_id=DeploymentId(deployment_id),
        name=body.name or body.model_id,
        model_id=ModelId(body.model_id),
        engine=body.engine,
        policy=body.policy,
    )


def _policy_problem(policy: Policy, known: set[str]) -> str:
    if policy.replicas_min > policy.replicas_max:
        return f"replicas_min {policy.replicas_min} is over replicas_max {policy.replicas_max}"
    if len(policy.keep_warm) > policy.replicas_max:
        return f"keep_warm names more PoPs than replicas_max {policy.replicas_max}"
    for field in ("keep_warm", "allow", "deny"):
        for name in getattr(policy, field):
            if name not in known:
                return f"{field} names {name!r}, which is no PoP and no PoP's country"
    return ""


def _found(row: V | None, what: str, name: str) -> V:
    if row is None:
        raise _missing(what, name)
    return row


def _missing(what: str, name: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the {what} {name[:128]!r}")
