"""The admin API: one table of endpoints, and a function for each."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

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
from isochrone.wire.artifact import check_artifact
from isochrone.wire.control import PeerRole
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import POP_PATTERN, WORDS, is_pop
from isochrone.wire.model import Model
from scheduler.api.deployments import DEPLOYMENT_ENDPOINTS
from scheduler.api.endpoint import (
    AdminRequest,
    Endpoint,
    Page,
    invalid_cursor,
    list_endpoint,
    not_found,
    parse_digits,
    read_endpoint,
    require_found,
)
from scheduler.api.identities import create_join_token, create_revocation, list_revocations
from scheduler.api.keys import KEY_ENDPOINTS
from scheduler.api.planning_snapshot import PICTURE_ENDPOINTS
from scheduler.api.rollouts import ROLLOUT_ENDPOINTS
from scheduler.api.usage import USAGE_ENDPOINTS
from scheduler.store import catalogue, deployments, identities
from scheduler.store.events import EventView, list_events
from scheduler.store.status import read_status


async def status(call: AdminRequest) -> StatusView:
    """The fleet in one answer."""
    acting = call.acting
    limits = acting.config.liveness
    return await read_status(
        call.connection,
        scheduler=acting.config.name,
        is_acting=acting.is_acting,
        silent_s=acting.heard().silent_s,
        # What is in the store lags by as long as a large fleet's pulses take to be written.
        silent_after_s=limits.suspect_after_s if acting.is_acting else limits.lost_after_s,
        frozen=acting.frozen,
        unmet=acting.unmet,
    )


async def put_pop(call: AdminRequest) -> PopView:
    """Make or change a PoP."""
    name = call.name
    if not is_pop(name):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot name a PoP {name[:20]!r}: give {WORDS[POP_PATTERN]}",
            param="pop",
        )
    before = await catalogue.get_pop(call.connection, name)
    body: PopBody = call.body
    after = await catalogue.put_pop(call.connection, name, body, call.etag)
    await call.changed("pop.put", name, before=before, after=after)
    return after


async def delete_pop(call: AdminRequest) -> None:
    """Delete a PoP that nothing is in."""
    await _delete(call, "pop")


async def drain_node(call: AdminRequest) -> NodeView:
    """Move a node's replicas elsewhere, then leave it empty."""
    drained = partial(catalogue.set_draining, call.connection, call.name, True)
    return await _change_node(call, "node.drain", drained)


async def undrain_node(call: AdminRequest) -> NodeView:
    """Let a node take replicas again."""
    undrained = partial(catalogue.set_draining, call.connection, call.name, False)
    return await _change_node(call, "node.undrain", undrained)


async def revoke_node(call: AdminRequest) -> NodeView:
    """Turn a node away for good; its routes are withdrawn and its conversation cut."""
    reason = "by the node's name"
    revoked = partial(identities.revoke, call.connection, PeerRole.AGENT, call.name, reason=reason)
    after = await _change_node(call, "node.revoke", revoked)
    call.acting.nudge_turn_away()
    return after


async def readmit_node(call: AdminRequest) -> NodeView:
    """Let a revoked node join again, with a new token and a new certificate."""
    readmitted = partial(identities.readmit, call.connection, PeerRole.AGENT, call.name)
    return await _change_node(call, "node.readmit", readmitted)


async def delete_node(call: AdminRequest) -> None:
    """Forget a node that holds no replica; what it was issued is refused from now on."""
    await _forget(call, "node", PeerRole.AGENT)


async def delete_router(call: AdminRequest) -> None:
    """Forget a router that is gone; what it was issued is refused from now on."""
    await _forget(call, "router", PeerRole.ROUTER)


async def put_model(call: AdminRequest) -> ModelView:
    """Make or change a catalogue entry; other files are a new version of whatever serves it."""
    model: Model = call.body
    if model.model_id != call.name:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot put: the path names {call.name}, the body {model.model_id}",
            param="model_id",
        )
    problem = check_artifact(model.artifact)
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, problem, param="artifact")
    before = await catalogue.get_model(call.connection, model.model_id)
    after = await catalogue.put_model(call.connection, model, call.etag)
    if before is not None and before.model.artifact.digest != model.artifact.digest:
        rolling = await deployments.bump_versions(call.connection, model.model_id)
        if rolling:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"cannot change the files of {model.model_id}: a rollout of {rolling} is on its "
                "way; abort it first",
            )
    await call.changed("model.put", model.model_id, before=before, after=after)
    return after


async def delete_model(call: AdminRequest) -> None:
    """Delete a model that no deployment serves."""
    await _delete(call, "model")


async def events(call: AdminRequest) -> Page:
    """What was done, the newest first."""
    before_id = parse_digits(call.after) if call.after else None
    if call.after and before_id is None:
        raise invalid_cursor()
    rows = await list_events(
        call.connection,
        before_id=before_id,
        limit=call.limit + 1,
        subject=call.query("subject"),
    )
    return call.page(rows, lambda row: str(row.event_id))


ENDPOINTS: Final = (
    Endpoint("GET", "/v1/status", status, "The fleet in one answer", StatusView),
    Endpoint(
        "GET", "/v1/pops", list_endpoint(catalogue.list_pops, "pop"),
        "List PoPs", PopView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/pops/{pop}", read_endpoint(catalogue.get_pop, "PoP"), "Read a PoP", PopView
    ),
    Endpoint("PUT", "/v1/pops/{pop}", put_pop, "Make or change a PoP", PopView, PopBody),
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
    Endpoint("POST", "/v1/nodes/{node_id}/undrain", undrain_node, "Use a node again", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/revoke", revoke_node, "Turn a node away", NodeView),
    Endpoint("POST", "/v1/nodes/{node_id}/readmit", readmit_node, "Let it join again", NodeView),
    Endpoint("DELETE", "/v1/nodes/{node_id}", delete_node, "Forget an empty node", status=204),
    Endpoint(
        "POST", "/v1/join-tokens", create_join_token, "Make a join token", JoinTokenView,
        JoinTokenBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/join-tokens", list_endpoint(identities.list_join_tokens, "token_id"),
        "List join tokens", JoinTokenView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/revocations", list_revocations, "List revocations", RevocationView,
        is_list=True,
    ),
    Endpoint(
        "POST", "/v1/revocations", create_revocation, "Refuse certificates", RevocationView,
        RevocationBody, status=201,
    ),
    Endpoint(
        "GET", "/v1/routers", list_endpoint(catalogue.list_routers, "router_id"),
        "List routers", RouterView, is_list=True,
    ),
    Endpoint("DELETE", "/v1/routers/{router_id}", delete_router, "Forget a router", status=204),
    Endpoint(
        "GET", "/v1/models", list_endpoint(catalogue.list_models, "model.model_id"),
        "List models", ModelView, is_list=True,
    ),
    Endpoint(
        "GET", "/v1/models/{model_id:.+}", read_endpoint(catalogue.get_model, "model"),
        "Read a model", ModelView,
    ),
    Endpoint("PUT", "/v1/models/{model_id:.+}", put_model, "Put a model", ModelView, Model),
    Endpoint("DELETE", "/v1/models/{model_id:.+}", delete_model, "Delete a model", status=204),
    Endpoint(
        "GET", "/v1/placements",
        list_endpoint(catalogue.list_placements, "replica_id", "deployment_id"),
        "List placements", PlacementView, is_list=True, query=("deployment_id",),
    ),
    *DEPLOYMENT_ENDPOINTS,
    *ROLLOUT_ENDPOINTS,
    *PICTURE_ENDPOINTS,
    *KEY_ENDPOINTS,
    *USAGE_ENDPOINTS,
    Endpoint(
        "GET", "/v1/events", events, "What was done", EventView, is_list=True, query=("subject",)
    ),
)  # fmt: skip


async def _change_node(
    call: AdminRequest, kind: str, deed: Callable[[], Awaitable[object]]
) -> NodeView:
    """Do a deed to a node that is there, and record what it was before and is after."""
    before = require_found(await catalogue.get_node(call.connection, call.name), "node", call.name)
    await deed()
    after = require_found(await catalogue.get_node(call.connection, call.name), "node", call.name)
    await call.changed(kind, call.name, before=before, after=after)
    return after


async def _forget(call: AdminRequest, table: str, role: PeerRole) -> None:
    await _delete(call, table)
    await identities.revoke(call.connection, role, call.name, reason="forgotten")
    call.acting.nudge_turn_away()


async def _delete(call: AdminRequest, table: str) -> None:
    if not await catalogue.delete_row(call.connection, table, call.name, call.etag):
        raise not_found(table, call.name)
    await call.changed(f"{table}.delete", call.name)
