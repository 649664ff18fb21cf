"""The admin API: the table of endpoints, and the functions of those without a file of their own."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec

from isochrone.service.trust.model_signature import ModelSigners, SignatureError
from isochrone.wire.admin import (
    JoinTokenBody,
    JoinTokenView,
    ModelView,
    NodeView,
    PlacementView,
    PopBody,
    PopView,
    RevocationBody,
    RevocationView,
    RouterView,
    StatusView,
)
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import PATTERN_DESCRIPTIONS, POP_PATTERN, is_pop
from isochrone.wire.models.artifact import check_artifact
from isochrone.wire.models.model import KIND_FEATURES, CatalogModel
from isochrone.wire.peers.control import PeerRole
from scheduler.api.admin.adapters import ADAPTER_ENDPOINTS
from scheduler.api.admin.deployments import DEPLOYMENT_ENDPOINTS
from scheduler.api.admin.endpoint import (
    AdminRequest,
    Endpoint,
    Page,
    invalid_cursor,
    list_endpoint,
    not_found,
    read_endpoint,
    require_found,
)
from scheduler.api.admin.identities import (
    create_join_token,
    create_revocation,
    delete_join_token,
    list_revocations,
)
from scheduler.api.admin.keys import KEY_ENDPOINTS
from scheduler.api.admin.planning_snapshot import SNAPSHOT_ENDPOINTS
from scheduler.api.admin.rollouts import ROLLOUT_ENDPOINTS
from scheduler.api.admin.tenants import TENANT_ENDPOINTS
from scheduler.api.admin.usage import USAGE_ENDPOINTS
from scheduler.store import catalogue, deployments
from scheduler.store.events import EventView, list_events
from scheduler.store.fleet import identities
from scheduler.store.status import read_status


async def status(request: AdminRequest) -> StatusView:
    """Read the state of the whole fleet."""
    context = request.context
    is_acting = context.lease.is_acting
    limits = context.liveness
    return await read_status(
        request.connection,
        scheduler=context.scheduler_name,
        is_acting=is_acting,
        silent_s=context.heartbeats.observed().silent_s,
        # A standby knows silence only from the store, where a large fleet's pulses arrive late.
        silent_after_s=limits.suspect_after_s if is_acting else limits.lost_after_s,
        frozen=context.placement.failure or context.placement.frozen,
        unmet=context.placement.unmet,
        unreadable=context.placement.unreadable,
        behind=context.routes.following.behind(context.lease.clock()) if is_acting else {},
        nodes_behind=context.heartbeats.following.behind(context.lease.clock())
        if is_acting
        else {},
        clocks=context.peers.clock_problems(),
    )


async def put_pop(request: AdminRequest) -> PopView:
    """Create or change a PoP."""
    name = request.name
    if not is_pop(name):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot name a PoP {name[:20]!r}: give {PATTERN_DESCRIPTIONS[POP_PATTERN]}",
            param="pop",
        )
    before = await catalogue.get_pop(request.connection, name)
    body: PopBody = request.body
    after = await catalogue.put_pop(request.connection, name, body, request.etag)
    await request.record_change("pop.put", name, before=before, after=after)
    return after


async def delete_pop(request: AdminRequest) -> None:
    """Delete a PoP that has no nodes or routers."""
    await _delete(request, "pop")


async def drain_node(request: AdminRequest) -> NodeView:
    """Move a node's replicas elsewhere and place no others on it."""
    drained = partial(catalogue.set_draining, request.connection, request.name, True)
    return await _change_node(request, "node.drain", drained)


async def undrain_node(request: AdminRequest) -> NodeView:
    """Let a node take replicas again."""
    undrained = partial(catalogue.set_draining, request.connection, request.name, False)
    return await _change_node(request, "node.undrain", undrained)


async def revoke_node(request: AdminRequest) -> NodeView:
    """Revoke a node: its routes are withdrawn, its connection is closed, it cannot join again."""
    reason = "by the node's name"
    revoked = partial(
        identities.revoke, request.connection, PeerRole.AGENT, request.name, reason=reason
    )
    after = await _change_node(request, "node.revoke", revoked)
    request.context.nudge_disconnect()
    return after


async def readmit_node(request: AdminRequest) -> NodeView:
    """Let a revoked node join again, with a new token and a new certificate."""
    readmitted = partial(identities.readmit, request.connection, PeerRole.AGENT, request.name)
    return await _change_node(request, "node.readmit", readmitted)


async def delete_node(request: AdminRequest) -> None:
    """Delete a node that has no replicas, and revoke its certificates."""
    await _delete_peer(request, "node", PeerRole.AGENT)


async def delete_router(request: AdminRequest) -> None:
    """Delete a router that no longer runs, and revoke its certificates."""
    name, lost_after_s = request.name, request.context.liveness.lost_after_s
    router = require_found(await catalogue.get_router(request.connection, name), "router", name)
    is_live = router.silent_s is not None and router.silent_s < lost_after_s
    if is_live and not router.revoked:
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot delete router {name}: it was in contact {router.silent_s:g} s ago, and would"
            f" go on serving with the keys of today; stop it and wait {lost_after_s:g} s, or revoke"
            f" it first (`isochrone revoke {name} --role router`)",
        )
    await _delete_peer(request, "router", PeerRole.ROUTER)


async def put_model(request: AdminRequest) -> ModelView:
    """Create or change a model. Other files make a new version of its deployments."""
    model: CatalogModel = request.body
    if model.model_id != request.name:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot store the model: the path names {request.name}, the body {model.model_id}",
            param="model_id",
        )
    problem = check_artifact(model.artifact)
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, problem, param="artifact")
    signers = request.context.signers
    try:
        signed_by = signers.signer(model.artifact) if signers.are_required else ""
    except SignatureError as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param="artifact") from error
    if model.kind not in KIND_FEATURES:
        kinds = ", ".join(KIND_FEATURES)
        reason = f"cannot use kind {model.kind[:40]!r}: expected one of {kinds}"
        raise ApiError(ErrorCode.INVALID_REQUEST, reason, param="kind")
    before = await catalogue.get_model(request.connection, model.model_id)
    after = await catalogue.put_model(request.connection, model, request.etag)
    # A replica keeps the signature that it was placed with, so one that is new replaces replicas.
    if before is not None and _signed_files(before.model) != _signed_files(model):
        rolling = await deployments.bump_versions(request.connection, model.model_id)
        if rolling:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"cannot change the files of {model.model_id}: a rollout of {rolling} is active; "
                "abort it first",
            )
    await request.record_change("model.put", model.model_id, before=before, after=after)
    return msgspec.structs.replace(after, signed_by=signed_by)


def _signed_files(model: CatalogModel) -> tuple[str, str]:
    return model.artifact.digest, model.artifact.signature


async def list_models(request: AdminRequest) -> Page:
    """List models."""
    rows = await catalogue.list_models(request.connection, request.after, request.limit + 1)
    signers = request.context.signers
    return request.page([_with_signer(row, signers) for row in rows], attrgetter("model.model_id"))


async def get_model(request: AdminRequest) -> ModelView:
    """Read a model."""
    row = await catalogue.get_model(request.connection, request.name)
    return _with_signer(require_found(row, "model", request.name), request.context.signers)


def _with_signer(row: ModelView, signers: ModelSigners) -> ModelView:
    """Return a model's view with the name of its signer, if that is a trusted one."""
    with suppress(SignatureError):
        return msgspec.structs.replace(row, signed_by=signers.signer(row.model.artifact))
    return row


async def delete_model(request: AdminRequest) -> None:
    """Delete a model that no deployment serves."""
    await _delete(request, "model")


async def events(request: AdminRequest) -> Page:
    """List recorded events, the newest first."""
    before_id = parse_digits(request.after, 18) if request.after else None
    if request.after and before_id is None:
        raise invalid_cursor()
    rows = await list_events(
        request.connection,
        before_id=before_id,
        limit=request.limit + 1,
        subject=request.query("subject"),
    )
    return request.page(rows, lambda row: str(row.event_id))


ENDPOINTS: Final = (
    Endpoint("GET", "/v1/status", status, "Read the fleet's state", StatusView),
    Endpoint(
        "GET", "/v1/pops", list_endpoint(catalogue.list_pops, "pop"),
        "List PoPs", PopView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/pops/{pop}", read_endpoint(catalogue.get_pop, "PoP"), "Read a PoP", PopView
    ),
    Endpoint("PUT", "/v1/pops/{pop}", put_pop, "Create or change a PoP", PopView, PopBody),
    Endpoint("DELETE", "/v1/pops/{pop}", delete_pop, "Delete an empty PoP", status=204),
    Endpoint(
        "GET", "/v1/nodes", list_endpoint(catalogue.list_nodes, "node_id"),
        "List nodes", NodeView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/nodes/{node_id}", read_endpoint(catalogue.get_node, "node"),
        "Read a node", NodeView,
    ),
    Endpoint("POST", "/v1/nodes/{node_id}/drain", drain_node, "Drain a node", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/undrain", undrain_node, "Undrain a node", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/revoke", revoke_node, "Revoke a node", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/readmit", readmit_node, "Readmit a node", NodeView),
    Endpoint("DELETE", "/v1/nodes/{node_id}", delete_node, "Delete an empty node", status=204),
    Endpoint(
        "POST", "/v1/join-tokens", create_join_token, "Create a join token", JoinTokenView,
        JoinTokenBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/join-tokens", list_endpoint(identities.list_join_tokens, "token_id"),
        "List join tokens", JoinTokenView, is_list=True,
    ),
    Endpoint(
        "DELETE", "/v1/join-tokens/{token_id}", delete_join_token, "Delete a join token",
        status=204,
    ),
    Endpoint(
        "GET", "/v1/revocations", list_revocations, "List revocations", RevocationView,
        is_list=True,
    ),
    Endpoint(
        "POST", "/v1/revocations", create_revocation, "Revoke certificates", RevocationView,
        RevocationBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/routers", list_endpoint(catalogue.list_routers, "router_id"),
        "List routers", RouterView, is_list=True,
    ),
    Endpoint("DELETE", "/v1/routers/{router_id}", delete_router, "Delete a router", status=204),
    Endpoint(
        "GET", "/v1/models", list_models,
        "List models", ModelView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/models/{model_id:.+}", get_model,
        "Read a model", ModelView,
    ),
    Endpoint(
        "PUT", "/v1/models/{model_id:.+}", put_model, "Create or change a model", ModelView,
        CatalogModel,
    ),
    Endpoint("DELETE", "/v1/models/{model_id:.+}", delete_model, "Delete a model", status=204),
    Endpoint(
        "GET", "/v1/placements",
        list_endpoint(catalogue.list_placements, "replica_id", "deployment_id"),
        "List placements", PlacementView, is_list=True, query=("deployment_id",),
    ),
    *DEPLOYMENT_ENDPOINTS,
    *ROLLOUT_ENDPOINTS,
    *SNAPSHOT_ENDPOINTS,
    *KEY_ENDPOINTS,
    *TENANT_ENDPOINTS,
    *ADAPTER_ENDPOINTS,
    *USAGE_ENDPOINTS,
    Endpoint(
        "GET", "/v1/events", events, "List events", EventView, is_list=True, query=("subject",)
    ),
)  # fmt: skip


async def _change_node(
    request: AdminRequest, kind: str, change: Callable[[], Awaitable[object]]
) -> NodeView:
    """Change an existing node and record its state before and after."""
    connection, name = request.connection, request.name
    before = require_found(await catalogue.get_node(connection, name), "node", name)
    await change()
    after = require_found(await catalogue.get_node(connection, name), "node", name)
    await request.record_change(kind, request.name, before=before, after=after)
    return after


async def _delete_peer(request: AdminRequest, table: str, role: PeerRole) -> None:
    await _delete(request, table)
    await identities.revoke(request.connection, role, request.name, reason="forgotten")
    request.context.nudge_disconnect()


async def _delete(request: AdminRequest, table: str) -> None:
    if not await catalogue.delete_row(request.connection, table, request.name, request.etag):
        raise not_found(table, request.name)
    await request.record_change(f"{table}.delete", request.name)
