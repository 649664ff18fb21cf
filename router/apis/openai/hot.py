"""The OpenAI routes that generate: a request off the wire, the corridor, an answer."""

from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, Final

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.ids import RequestId, is_request_id
from isochrone.wire.routes import DeploymentEntry, KeyEntry
from router.apis.openai.decode import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    RERANK,
    decode,
    drawn,
    resumption,
    wants_usage,
    with_usage_wish,
)
from router.apis.openai.encode import error_reply
from router.apis.openai.prompt import (
    Request,
    answers,
    output_tokens_max,
    rendered,
    text_bytes,
)
from router.asked import Asked
from router.config import RouterConfig
from router.dataplane import message
from router.dataplane.http1 import Fields
from router.dataplane.message import Reply
from router.dataplane.server import ClientConnection
from router.decide.admit import Admitted, may_use
from router.decide.affinity import SESSION_BYTES_MAX, seed_of
from router.decide.prefixes import BLOCK_BYTES, NO_KEYS, PrefixKeys, keys_of
from router.fleet import Fleet
from router.metrics import Metrics
from router.serve import Corridor

READERS: Final[dict[str, "msgspec.json.Decoder[Any]"]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
    "/v1/rerank": RERANK,
}
KINDS: Final = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank"}
"""What a model must be for; on every other route it must chat."""

MODELS_NAMED: Final = 8
"""How many models are named to one who asks for another."""

REQUEST_ID: Final = headers.REQUEST_ID.encode()
SESSION_AFFINITY: Final = headers.SESSION_AFFINITY.encode()


class OpenAiSurface:
    """Answers the hot routes of the OpenAI surface."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: Fleet,
        corridor: Corridor,
        metrics: Metrics,
        unix_clock: Callable[[], float],
        new_id: Callable[[str], RequestId],
    ) -> None:
        """Take what the house shares; clocks and ids are made at the edge, here."""
        self._config = config
        self._fleet = fleet
        self._corridor = corridor
        self._metrics = metrics
        self._unix_clock = unix_clock
        self._new_id = new_id
        self._admitted = Admitted()

    def gate(self, fields: Fields) -> KeyEntry:
        """Return whose request this is before its body is read, or raise ApiError 401."""
        shown = fields.get(b"authorization", b"")
        return self._admitted.authenticate(self._fleet.keys, shown, self._unix_clock())

    def answer(self, request: message.Request, client: ClientConnection) -> Awaitable[None]:
        """Return the answering of one request."""
        self.identify(request)
        only_post(request)
        asked = self.asked(request, request.path, request.body, openai_error_event)
        return self._corridor.serve(asked, client)

    def encode_error(self, error: ApiError) -> Reply:
        """Count an error and write it in OpenAI's shape."""
        self._metrics.errors.labels(error.code.value).inc()
        return error_reply(error)

    def deployment(self, name: str, key: KeyEntry) -> DeploymentEntry:
        """Return the deployment of that name, or raise ApiError 404, also where it is forbidden."""
        entry = self._fleet.deployment(name)
        if entry is None or not may_use(key, name):
            usable = (one.name for one in self._fleet.deployments if may_use(key, one.name))
            named = ", ".join(islice(usable, MODELS_NAMED)) or "none"
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"cannot find the model {name!r}: it does not exist, or this key may not use it;"
                f" models for this key (GET /v1/models): {named}",
                param="model",
            )
        return entry

    def identify(self, request: message.Request) -> None:
        """Give a request its id, and the one that its client knows it by."""
        request.request_id, request.known_as = self.request_ids(request.header(REQUEST_ID))

    def request_ids(self, sent: str) -> tuple[RequestId, str]:
        """Return a new id, and that by which the client knows it: its own, where well formed."""
        own = sent if sent and is_request_id(sent) else ""
        request_id = self._new_id(own)
        return request_id, own or request_id

    def asked(
        self,
        request: message.Request,
        path: str,
        body: bytes,
        error_event: Callable[[ApiError], bytes],
    ) -> Asked:
        """Return what a request asks for, or raise ApiError saying what is wrong with it."""
        key = request.key
        assert key is not None
        asked: Request = decode(body, READERS[path])
        deployment = self.deployment(asked.model, key)
        kind = KINDS.get(path, "chat")
        if deployment.kind != kind:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot ask {asked.model!r} so: it is a model of kind {deployment.kind!r},"
                f" this request is for one of kind {kind!r}",
                param="model",
            )
        prompt, count = rendered(asked), answers(asked)
        return Asked(
            request_id=RequestId(request.request_id),
            known_as=request.known_as,
            key=key,
            deployment=deployment,
            path=path,
            body=with_usage_wish(body, asked),
            text_bytes=text_bytes(asked, len(prompt)),
            answers=count,
            output_tokens_max=self._output_tokens(asked, count, deployment),
            is_stream=bool(asked.stream),
            wants_usage=wants_usage(asked),
            session=_session(request, key),
            reject_if_busy=asked.options is not None and asked.options.reject_if_busy,
            arrived_s=request.arrived_s,
            started_at=self._unix_clock(),
            error_event=error_event,
            resume=resumption(body, asked) if asked.stream else None,
            drawn=drawn(asked) if asked.stream else "",
            prefix_keys=_prefix_keys(prompt, key, deployment),
        )

    def _output_tokens(self, asked: Request, answers: int, deployment: DeploymentEntry) -> int:
        wanted = output_tokens_max(asked)
        if wanted is None:
            wanted = self._config.output_tokens_assumed
        return max(1, min(wanted, deployment.context_tokens) * answers)


def only_post(request: message.Request) -> None:
    """Raise ApiError 405 for any other method."""
    if request.method != b"POST":
        raise ApiError(
            ErrorCode.METHOD_NOT_ALLOWED,
            f"cannot serve: {request.path} takes POST, not {request.method.decode()}",
            headers={"allow": "POST"},
        )


def _prefix_keys(prompt: bytes, key: KeyEntry, deployment: DeploymentEntry) -> PrefixKeys:
    if len(prompt) < BLOCK_BYTES:
        return NO_KEYS
    # Caches are kept apart by tenant: so are the keys.
    return keys_of(prompt, seed_of(f"{key.tenant_id}\0{deployment.deployment_id}"))


def _session(request: message.Request, key: KeyEntry) -> str:
    session = request.header(SESSION_AFFINITY).strip()
    if len(session) > SESSION_BYTES_MAX:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use {headers.SESSION_AFFINITY}: more than {SESSION_BYTES_MAX} bytes",
            param=headers.SESSION_AFFINITY,
        )
    # A tenant's session names are its own: nobody is seated by another's.
    return f"{key.tenant_id}/{session}" if session else ""
