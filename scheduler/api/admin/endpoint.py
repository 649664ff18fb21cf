"""The shared part of all admin endpoints: decoding, paging, ETags, idempotency and the transaction.

An endpoint is a row of a table (`Endpoint`) and an async function of an `AdminRequest`; those that
only read are made by `list_endpoint` and `read_endpoint`. An endpoint that changes something runs
in one transaction with the event that records it: if it raises, nothing was changed.
"""

import base64
import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from cryptography.fernet import Fernet, InvalidToken

from isochrone.service.network.http_server import read_body
from isochrone.service.trust.identity import Authority
from isochrone.service.trust.model_signature import NO_SIGNERS, ModelSigners
from isochrone.wire.client_keys.keys import PREFIX as KEY_PREFIX
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from scheduler.api.admin.json_body import decode_body
from scheduler.api.client_objects.adapter_intake import AdapterIntake
from scheduler.decide.membership import LivenessLimits
from scheduler.planner.client import PlannerClient, PlannerFailed
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.heartbeats import Heartbeats
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.placement_status import PlacementStatus
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.catalogue import EtagMoved, StillUsed, bump_generation
from scheduler.store.events import record_event
from scheduler.store.idempotency import StoredResponse, load_response, store_response
from scheduler.store.pool import BAD_DATA, UNAVAILABLE, Connection, Pool, transaction, using

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 1024 * 1024
BODY_TIMEOUT_S: Final = 10.0
ETAG_PATTERN: Final = r'^(\*|(W/)?"[0-9]{1,18}")$'
LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 500
ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
ID_LENGTH: Final = 12
IDEMPOTENCY_KEY: Final = re.compile(r"^[\x21-\x7e]{1,128}$")

T = TypeVar("T")
V = TypeVar("V", bound=msgspec.Struct)


class AdminContext(NamedTuple):
    """The parts of the scheduler that endpoints use, besides the connection of a request."""

    scheduler_name: str
    liveness: LivenessLimits
    pool: Pool
    authority: Authority
    planner: PlannerClient
    lease: LeaseState
    heartbeats: Heartbeats
    placement: PlacementStatus
    routes: PublishedRoutes
    peers: PeerRegistry
    nudge_place: Callable[[], None]
    nudge_disconnect: Callable[[], None]
    adapters: AdapterIntake | None = None
    """None if this cluster stores no files of clients."""
    signers: ModelSigners = NO_SIGNERS


class Page(NamedTuple):
    """One page of a list, and the id of its last row if there may be more."""

    rows: Sequence[msgspec.Struct]
    last_id: str | None


class AdminRequest:
    """One decoded request: the argument of an endpoint's function."""

    def __init__(
        self, http: web.Request, context: AdminContext, connection: Connection, body: Any
    ) -> None:
        self.context = context
        self.connection = connection
        self.body = body
        self.etag = _if_match(http)
        self.name = next(iter(http.match_info.values()), "")
        """The first name in the path; empty if there is none."""
        self.names = http.match_info
        """All names in the path."""
        self.on_commit: list[Callable[[], Awaitable[None]]] = []
        """Actions to run once the transaction is committed."""
        self.changed_keys: list[KeyId] = []
        """The keys to publish, if they are neither in the result nor named by the path."""
        self._http = http

    def query(self, name: str) -> str | None:
        """Return a query parameter."""
        return self._http.query.get(name)

    @property
    def limit(self) -> int:
        """Return how many rows a page may have."""
        text = self._http.query.get("limit", str(LIMIT_DEFAULT))
        limit = parse_digits(text)
        if limit is None or not 1 <= limit <= LIMIT_MAX:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot page: limit is {text[:20]!r}, give 1 to {LIMIT_MAX}",
                param="limit",
            )
        return limit

    @property
    def after(self) -> str:
        """Return the id after which the page begins."""
        cursor = self._http.query.get("cursor", "")
        try:
            return base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        except ValueError:
            raise invalid_cursor() from None

    def page(self, rows: Sequence[V], row_id: Callable[[V], str]) -> Page:
        """Return the first `limit` of `limit + 1` rows; the last row shows that there are more."""
        if len(rows) <= self.limit:
            return Page(rows, None)
        shown = rows[: self.limit]
        return Page(shown, row_id(shown[-1]))

    async def record_change(self, kind: str, subject: str, **states: msgspec.Struct | None) -> None:
        """Record a change that placement depends on: plans made before it cannot be committed."""
        await bump_generation(self.connection)
        await self.record(kind, subject, **states)

    async def record(
        self,
        kind: str,
        subject: str,
        *,
        before: msgspec.Struct | None = None,
        after: msgspec.Struct | None = None,
    ) -> None:
        """Append this request's event."""
        await record_event(
            self.connection,
            actor="admin",
            kind=kind,
            subject=subject,
            before=before,
            after=after,
            request_id=self._http.headers.get("x-request-id", "")[:64],
        )


EndpointResult = msgspec.Struct | msgspec.Raw | Page | None
EndpointFunction = Callable[[AdminRequest], Awaitable[EndpointResult]]


class Endpoint(NamedTuple):
    """One row of the table: a route, its function, and the types of its response and body."""

    method: str
    path: str
    function: EndpointFunction
    summary: str
    response: Any = None
    body: Any = None
    status: int = 200
    is_list: bool = False
    query: tuple[str, ...] = ()
    changes_key: bool = False
    takes_file: bool = False
    """Whether its body is a file of any size, not JSON. The function gets an UploadedFile."""

    @property
    def query_names(self) -> tuple[str, ...]:
        """Its query parameters, with those of all lists."""
        return (*self.query, "limit", "cursor") if self.is_list else self.query


def list_endpoint(
    read: Callable[..., Awaitable[Sequence[Any]]], id_field: str, *queries: str
) -> EndpointFunction:
    """Return a function that lists the rows that `read` reads, in pages, in the order of
    `id_field`."""

    async def page(request: AdminRequest) -> Page:
        filters = [request.query(name) for name in queries]
        rows = await read(request.connection, request.after, request.limit + 1, *filters)
        return request.page(rows, attrgetter(id_field))

    page.__name__ = read.__name__
    return page


def read_endpoint(
    read: Callable[[Connection, str], Awaitable[V | None]], kind: str
) -> EndpointFunction:
    """Return a function that reads the row that the path names, or answers 404."""

    async def row(request: AdminRequest) -> EndpointResult:
        return require_found(await read(request.connection, request.name), kind, request.name)

    row.__name__ = read.__name__
    return row


def new_id() -> str:
    """Return a random id that cannot be guessed."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))


def endpoint_handler(
    endpoint: Endpoint, context: AdminContext
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the aiohttp handler of an endpoint."""
    decoder = msgspec.json.Decoder(endpoint.body) if endpoint.body is not None else None

    async def answer(http: web.Request) -> web.Response:
        if endpoint.takes_file:
            return await _respond_to_file(endpoint, context, http)
        raw = await read_body(http, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        body = None
        if decoder is not None:
            body = decode_body(raw, decoder)
        return await _respond(endpoint, context, http, raw, body)

    async def handle(http: web.Request) -> web.Response:
        _check_query(endpoint, http)
        try:
            return await answer(http)
        except UNAVAILABLE as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot answer: the database is unreachable", retry_after_s=2
            ) from error
        except PlannerFailed as error:
            raise ApiError(ErrorCode.UNAVAILABLE, str(error), retry_after_s=5) from error
        except EtagMoved as error:
            raise ApiError(
                ErrorCode.PRECONDITION_FAILED,
                f"cannot change {error}: it does not exist or has changed; read it again",
            ) from error
        except StillUsed as error:
            raise ApiError(ErrorCode.CONFLICT, str(error)) from error
        except BAD_DATA as error:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot store: a text contains a NUL or a value is too large",
            ) from error

    return handle


def _check_query(endpoint: Endpoint, http: web.Request) -> None:
    """Raise ApiError 400 for a query parameter that the endpoint would ignore."""
    for name in http.query:
        if name not in endpoint.query_names:
            known = ", ".join(endpoint.query_names) or "none"
            message = f"cannot use the query parameter {name[:80]!r}: this path has {known}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message, param=name[:80])


async def _respond_to_file(
    endpoint: Endpoint, context: AdminContext, http: web.Request
) -> web.Response:
    """Store a body as a file, then answer. If that fails, the file is deleted."""
    if context.adapters is None:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot store a file: set `batch_folder` or `batch_bucket` in the configuration of all"
            " schedulers",
        )
    uploaded = await context.adapters.write("", http.content.read)  # an operator's
    try:
        return await _respond(endpoint, context, http, b"", uploaded)
    except BaseException:
        await context.adapters.discard(uploaded)
        raise


async def _respond(
    endpoint: Endpoint, context: AdminContext, http: web.Request, raw: bytes, body: Any
) -> web.Response:
    key = http.headers.get("idempotency-key") if endpoint.method == "POST" else None
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot use the Idempotency-Key: expected 1 to 128 visible ASCII characters",
        )
    body_sha256 = hashlib.sha256(raw).hexdigest()
    # A GET needs no transaction, and may wait for the planner longer than one may stay idle.
    opened = using if endpoint.method == "GET" else transaction
    request, is_carried_out = None, False
    try:
        async with opened(context.pool) as connection:
            if key:
                stored = await load_response(connection, key, http.method, http.path)
                if stored is not None:
                    return _replay(stored, body_sha256, context.authority.cipher())
            request = AdminRequest(http, context, connection, body)
            result = await endpoint.function(request)
            encoded = _encode(result)
            if key:
                # Encrypted: it may contain an API key, of which the database holds only the digest.
                encrypted = context.authority.cipher().encrypt(encoded)
                stored = StoredResponse(body_sha256, endpoint.status, encrypted)
                await store_response(connection, key, http.method, http.path, stored)
            is_carried_out = True
    except BaseException:
        if request is not None and is_carried_out:
            # Only the commit failed, and may have taken effect all the same.
            _announce(endpoint, context, request, result)
        raise
    for act in request.on_commit:
        try:
            await act()
        except OSError as error:
            # The change is made, even if files stay on disk.
            log.warning("file not deleted", extra={"fields": {"reason": str(error)}})
    _announce(endpoint, context, request, result)
    response = web.Response(
        status=204 if result is None else endpoint.status,
        body=encoded if result is not None else None,
        content_type="application/json" if result is not None else None,
    )
    etag = getattr(result, "etag", None)
    if etag is not None:
        response.headers["etag"] = f'"{etag}"'
    return response


def _announce(
    endpoint: Endpoint, context: AdminContext, request: AdminRequest, result: EndpointResult
) -> None:
    """Nudge the jobs that act on a request's change."""
    if endpoint.method == "GET":
        return
    key_ids = request.changed_keys
    if not endpoint.changes_key:
        context.nudge_place()
        context.routes.mark_changed()
    elif not key_ids:
        # Keys do not affect placement, and the other keys need not be read again.
        key_ids = [KeyId(getattr(result, "key_id", "") or request.name)]
    if context.lease.is_held:
        # A scheduler that stands by publishes none, and would keep the ids of all that it changed.
        for key_id in key_ids:
            context.routes.mark_key_changed(key_id)


def _replay(stored: StoredResponse, body_sha256: str, cipher: Fernet) -> web.Response:
    if stored.body_sha256 != body_sha256:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot repeat: this Idempotency-Key was used with another body",
        )
    try:
        body = cipher.decrypt(stored.body)
    except InvalidToken as error:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot repeat: the request was carried out, but its response can no longer be "
            "decrypted",
        ) from error
    return web.Response(
        status=stored.status if body else 204,
        body=body or None,
        content_type="application/json",
        headers={"idempotent-replay": "true"},
    )


def _encode(result: EndpointResult) -> bytes:
    if result is None:
        return b""
    if isinstance(result, Page):
        cursor = None
        if result.last_id is not None:
            cursor = base64.urlsafe_b64encode(result.last_id.encode()).decode()
        return msgspec.json.encode({"data": list(result.rows), "next_cursor": cursor})
    return msgspec.json.encode(result)


def _if_match(http: web.Request) -> int | None:
    """Return the ETag of an If-Match header; None if the request does not depend on one."""
    text = http.headers.get("if-match", "*").strip()
    if not re.fullmatch(ETAG_PATTERN, text):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f'cannot use If-Match: expected an ETag of this API, such as "3", got {text[:40]!r}',
            param="If-Match",
        )
    return None if text == "*" else int(text.strip('W/"'))


def invalid_cursor() -> ApiError:
    """Return the error for a cursor that no list of this API returned."""
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        "cannot page: the cursor was not returned by this API",
        param="cursor",
    )


def require_found(row: T | None, kind: str, name: str) -> T:
    """Return `row`, or raise the 404 error if it is None."""
    if row is None:
        raise not_found(kind, name)
    return row


def not_found(kind: str, name: str) -> ApiError:
    """Return the 404 error for a thing of this kind and name."""
    if kind == "key" and name.startswith(f"{KEY_PREFIX}_"):
        # The secret would go on to terminals and logs.
        reason = "give its id, the 12 characters after `iso_`, and not the whole key"
        return ApiError(ErrorCode.NOT_FOUND, f"cannot find the key: {reason}")
    # Each kind has a list under its plural. A "budget of tenant" is in that of tenants.
    command = f"isochrone {kind.lower().rpartition(' ')[2]}s list"
    shows = "shows all"
    if kind == "deployment":
        shows = "shows the ids, and the names that only clients use"
    elif kind == "tenant":  # `tenants list` shows those with a budget
        command, shows = "isochrone keys list", "shows those that have or had a key"
    elif kind == "join token":
        command = "isochrone nodes join-tokens"
    message = f"cannot find the {kind} {name[:128]!r}: `{command}` {shows}"
    return ApiError(ErrorCode.NOT_FOUND, message)
