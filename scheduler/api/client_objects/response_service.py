"""The routes of stored responses and conversations on the control listener."""

from aiohttp import web

from isochrone.wire.peers import relay, responses
from scheduler.api.client_objects.conversations import ConversationEndpoints
from scheduler.api.client_objects.relayed import (
    ClientTurns,
    LargeBodies,
    PublicHandler,
    public_route,
    work_route,
)
from scheduler.api.client_objects.responses import ResponseEndpoints, ResponseWork
from scheduler.decide.response_limits import ResponseLimits
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.pool import Pool


def add_response_routes(
    app: web.Application,
    pool: Pool,
    limits: ResponseLimits,
    tokens: RelayTokens,
    turns: ClientTurns,
) -> None:
    """Add all routes. Tenants take `turns` where a request of theirs uses the pool."""
    work, shown = ResponseWork(pool, limits, turns), ResponseEndpoints(pool)
    conversations, large = ConversationEndpoints(pool, limits), LargeBodies()
    response, conversation = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    item = f"{conversation}/items/{{item_id}}"
    routes: tuple[tuple[str, str, PublicHandler], ...] = (
        ("GET", response, shown.show),
        ("DELETE", response, shown.delete),
        ("POST", f"{response}/cancel", shown.cancel),
        ("GET", f"{response}/input_items", shown.input_items),
        ("POST", "/v1/conversations", large.limited(conversations.create)),
        ("GET", conversation, conversations.show),
        ("POST", conversation, large.limited(conversations.update)),
        ("DELETE", conversation, conversations.delete),
        ("GET", f"{conversation}/items", conversations.list_items),
        ("POST", f"{conversation}/items", large.limited(conversations.add_items)),
        ("GET", item, conversations.show_item),
        ("DELETE", item, conversations.delete_item),
    )
    for method, path, handler in routes:
        relayed = f"{relay.PUBLIC_PREFIX}{path}"
        app.router.add_route(method, relayed, public_route(tokens, turns.limited(handler)))
    for path, handle in (
        (responses.BEGIN_PATH, work.begin),
        (responses.FINISH_PATH, work.finish),
        (responses.LEASE_PATH, work.lease),
    ):
        limit = responses.MESSAGE_BYTES_MAX
        app.router.add_post(path, work_route(tokens, handle, limit))
