"""The admin API: one table of endpoints, and a function for each."""

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
    Call,
    Endpoint,
    Page,
    found,
    missing,
    whole,
    wrong_cursor,
)
from scheduler.api.identities import (
    create_join_token,
    create_revocation,
    list_join_tokens,
    list_revocations,
    readmit_node,
    revoke_node,
)
from scheduler.api.keys import KEY_ENDPOINTS
from scheduler.api.usage import USAGE_ENDPOINTS
from scheduler.store import catalogue
from scheduler.store.events import Event, list_events
from scheduler.store.identities import revoke
from scheduler.store.status import read_status


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
    return found(
        await catalogue.get_pop(call.connection, call.part("pop")), "PoP", call.part("pop")
    )


async def put_pop(call: Call) -> PopView:
    """Make or change a PoP."""
    name = call.part("pop")
    if not is_pop(name):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot name a PoP {name[:20]!r}: give {WORDS[POP_PATTERN]}",
            param="pop",
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
    return found(await catalogue.get_node(call.connection, name), "node", name)


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
    return found(await catalogue.get_model(call.connection, name), "model", name)


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


async def list_placements(call: Call) -> Page:
    """Placements, of one deployment or of all."""
    rows = await catalogue.list_placements(
        call.connection, call.after, call.limit + 1, call.query("deployment_id")
    )
    return call.page(rows, lambda row: row.replica_id)


async def events(call: Call) -> Page:
    """What was done, the newest first."""
    before_id = whole(call.after) if call.after else None
    if call.after and before_id is None:
        raise wrong_cursor()
    rows = await list_events(
        call.connection,
        before_id=before_id,
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
        "GET", "/v1/placements", list_placements, "List placements", PlacementView, is_list=True,
        query=("deployment_id",),
    ),
    *DEPLOYMENT_ENDPOINTS,
    *KEY_ENDPOINTS,
    *USAGE_ENDPOINTS,
    Endpoint(
        "GET", "/v1/events", events, "What was done", Event, is_list=True, query=("subject",)
    ),
)  # fmt: skip


async def _set_draining(call: Call, kind: str, draining: bool) -> NodeView:
    name = call.part("node_id")
    before = await catalogue.get_node(call.connection, name)
    if not await catalogue.set_draining(call.connection, name, draining):
        raise missing("node", name)
    await catalogue.touch(call.connection)
    after = await catalogue.get_node(call.connection, name)
    await call.record(kind, name, before=before, after=after)
    return found(after, "node", name)


async def _delete(call: Call, table: str, column: str, name: str) -> None:
    if not await catalogue.delete_row(call.connection, table, column, name, call.etag):
        raise missing(table, name)
    await catalogue.touch(call.connection)
    await call.record(f"{table}.delete", name)
