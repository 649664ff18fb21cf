"""What every admin endpoint has in common: decoding, paging, ETags, idempotency, one transaction.

An endpoint is a row of a table (`Endpoint`) and an async function of an `AdminRequest`; those that
only read are made by `list_endpoint` and `read_endpoint`. One that changes a thing runs in a
transaction with the event of its deed; whatever it raises, nothing of it was done.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from cryptography.fernet import Fernet, InvalidToken

from isochrone.service.http_server import read_body
from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.acting import Acting
from scheduler.planner.process import PlannerFailed
from scheduler.store.catalogue import EtagMoved, StillUsed, bump_generation
from scheduler.store.events import record_event
from scheduler.store.idempotency import StoredResponse, load_response, store_response
from scheduler.store.pool import BAD_DATA, UNAVAILABLE, Connection, transaction, using

BODY_BYTES_MAX: Final = 1024 * 1024
BODY_TIMEOUT_S: Final = 10.0
LIMIT_DEFAULT: Final = 100
LIMIT_MAX: Final = 500
ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
IDEMPOTENCY_KEY: Final = re.compile(r"^[\x21-\x7e]{1,128}$")

T = TypeVar("T")
V = TypeVar("V", bound=msgspec.Struct)


class Page(NamedTuple):
    """One page of a list, and the id of its last row if there may be more."""

    rows: Sequence[msgspec.Struct]
    last: str | None


class AdminRequest:
    """One request, decoded: what an endpoint's function gets."""

    def __init__(
        self, request: web.Request, acting: Acting, connection: Connection, body: Any
    ) -> None:
        self.acting = acting
        self.connection = connection
        self.body = body
        self.etag = _if_match(request)
        self.name = next(iter(request.match_info.values()), "")
        """What the path names; no path names two things."""
        self._request = request

    def query(self, name: str) -> str | None:
        """Return a query parameter."""
        return self._request.query.get(name)

    @property
    def limit(self) -> int:
        """Return how many rows a page may hold."""
        text = self._request.query.get("limit", str(LIMIT_DEFAULT))
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
        cursor = self._request.query.get("cursor", "")
        try:
            return base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        except ValueError:
            raise invalid_cursor() from None

    def page(self, rows: Sequence[V], name: Callable[[V], str]) -> Page:
        """Return a page of at most `limit` rows, of `limit + 1` asked for."""
        if len(rows) <= self.limit:
            return Page(rows, None)
        kept = rows[: self.limit]
        return Page(kept, name(kept[-1]))

    async def changed(self, kind: str, subject: str, **states: msgspec.Struct | None) -> None:
        """Record a deed that placement depends on: no plan made before it may be committed."""
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
        """Append the event of this deed."""
        await record_event(
            self.connection,
            actor="admin",
            kind=kind,
            subject=subject,
            before=before,
            after=after,
            request_id=self._request.headers.get("x-request-id", "")[:64],
        )


Answer = msgspec.Struct | msgspec.Raw | Page | None
Function = Callable[[AdminRequest], Awaitable[Answer]]


class Endpoint(NamedTuple):
    """One row of the table: what is asked, what answers, and with what."""

    method: str
    path: str
    function: Function
    summary: str
    answer: Any = None
    body: Any = None
    status: int = 200
    is_list: bool = False
    query: tuple[str, ...] = ()


def list_endpoint(
    read: Callable[..., Awaitable[Sequence[Any]]], name: str, *queries: str
) -> Function:
    """Return what lists all that `read` reads, by pages; rows are in the order of `name`."""

    async def page(call: AdminRequest) -> Page:
        asked = [call.query(query) for query in queries]
        rows = await read(call.connection, call.after, call.limit + 1, *asked)
        return call.page(rows, attrgetter(name))

    page.__name__ = read.__name__
    return page


def read_endpoint(read: Callable[[Connection, str], Awaitable[V | None]], what: str) -> Function:
    """Return what shows the one thing that the path names, as `read` reads it."""

    async def one(call: AdminRequest) -> Answer:
        return require_found(await read(call.connection, call.name), what, call.name)

    one.__name__ = read.__name__
    return one


def new_id() -> str:
    """Return an id that nobody can guess."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(12))


def endpoint_handler(
    endpoint: Endpoint, acting: Acting
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the aiohttp handler of an endpoint."""
    reader = msgspec.json.Decoder(endpoint.body) if endpoint.body is not None else None

    async def handle(request: web.Request) -> web.Response:
        raw = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        body = None
        if reader is not None:
            try:
                body = codec.decode_json(raw, reader)
            except codec.MalformedFrame as error:
                raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
        try:
            return await _answer(endpoint, acting, request, raw, body)
        except UNAVAILABLE as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot answer: the database is away", retry_after_s=2
            ) from error
        except PlannerFailed as error:
            raise ApiError(ErrorCode.UNAVAILABLE, str(error), retry_after_s=5) from error
        except EtagMoved as error:
            raise ApiError(
                ErrorCode.PRECONDITION_FAILED,
                f"cannot change {error}: it is not there or has changed; read it again",
            ) from error
        except StillUsed as error:
            raise ApiError(ErrorCode.CONFLICT, str(error)) from error
        except BAD_DATA as error:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, "cannot store: a text holds a NUL or a value is too big"
            ) from error

    return handle


async def _answer(
    endpoint: Endpoint, acting: Acting, request: web.Request, raw: bytes, body: Any
) -> web.Response:
    key = request.headers.get("idempotency-key", "") if endpoint.method == "POST" else ""
    if key and not IDEMPOTENCY_KEY.match(key):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "cannot use the Idempotency-Key: 1 to 128 visible letters"
        )
    sha = hashlib.sha256(raw).hexdigest()
    # Who only reads may ask the planner, which takes its time.
    lend = using if endpoint.method == "GET" else transaction
    async with lend(acting.pool) as connection:
        if key:
            stored = await load_response(connection, key, request.method, request.path)
            if stored is not None:
                return _replay(stored, sha, acting.authority.cipher())
        call = AdminRequest(request, acting, connection, body)
        answer = await endpoint.function(call)
        encoded = _encode(answer)
        if key:
            # It may show a key, of which only the digest is to be found in a database.
            hidden = acting.authority.cipher().encrypt(encoded)
            stored = StoredResponse(sha, endpoint.status, hidden)
            await store_response(connection, key, request.method, request.path, stored)
    if endpoint.method != "GET":
        acting.nudge_place()
        acting.publish()
    response = web.Response(
        status=204 if answer is None else endpoint.status,
        body=encoded if answer is not None else None,
        content_type="application/json" if answer is not None else None,
    )
    etag = getattr(answer, "etag", None)
    if etag is not None:
        response.headers["etag"] = f'"{etag}"'
    return response


def _replay(stored: StoredResponse, sha: str, cipher: Fernet) -> web.Response:
    if stored.body_sha256 != sha:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot repeat: this Idempotency-Key was used with another body",
        )
    try:
        body = cipher.decrypt(stored.body)
    except InvalidToken as error:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot repeat: it was done, but what was answered cannot be read any more",
        ) from error
    return web.Response(
        status=stored.status if body else 204,
        body=body or None,
        content_type="application/json",
        headers={"idempotent-replay": "true"},
    )


def _encode(answer: Answer) -> bytes:
    if answer is None:
        return b""
    if isinstance(answer, Page):
        cursor = None
        if answer.last is not None:
            cursor = base64.urlsafe_b64encode(answer.last.encode()).decode()
        return msgspec.json.encode({"data": list(answer.rows), "next_cursor": cursor})
    return msgspec.json.encode(answer)


def _if_match(request: web.Request) -> int | None:
    text = request.headers.get("if-match", "").strip()
    if text in ("", "*"):
        return None
    etag = parse_digits(text.removeprefix("W/").strip('"'))
    if etag is None:
        raise ApiError(
            ErrorCode.PRECONDITION_FAILED, "cannot change: If-Match is not an ETag of this API"
        )
    return etag


def parse_digits(text: str) -> int | None:
    """Return the number that these digits are; None for what int() takes, or fails on, beside."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def invalid_cursor() -> ApiError:
    """Return the error that says where cursors come from."""
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        "cannot page: the cursor is not one that this API gave",
        param="cursor",
    )


def require_found(row: T | None, what: str, name: str) -> T:
    """Return what was looked for, or raise ApiError where it is not there."""
    if row is None:
        raise not_found(what, name)
    return row


def not_found(what: str, name: str) -> ApiError:
    """Return the error that says that there is no such thing."""
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the {what} {name[:128]!r}")
