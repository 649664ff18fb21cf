"""The OpenAI routes that generate: from a request off the wire to what the corridor is asked."""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import RequestId
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
from router.apis.openai.prompt import (
    Request,
    answers,
    output_tokens_max,
    rendered,
    text_bytes,
)
from router.apis.openai.schema import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RERANK_PATH
from router.asked import Asked
from router.config import RouterConfig
from router.dataplane import message
from router.dataplane.http1 import Fields
from router.decide.affinity import SESSION_BYTES_MAX, hash64
from router.decide.authentication import AuthenticationCache, may_use
from router.decide.prefix_index import BLOCK_BYTES, NO_KEYS, PrefixKeys, prefix_keys
from router.fleet_state import FleetState

READERS: Final[dict[str, "msgspec.json.Decoder[Any]"]] = {
    CHAT_PATH: CHAT,
    COMPLETIONS_PATH: COMPLETION,
    EMBEDDINGS_PATH: EMBEDDING,
    RERANK_PATH: RERANK,
}
KINDS: Final = {EMBEDDINGS_PATH: "embedding", RERANK_PATH: "rerank"}
"""What a model must be for; on every other route it must chat."""

MODELS_NAMED: Final = 8
"""How many models are named to one who asks for another."""

SESSION_AFFINITY: Final = headers.SESSION_AFFINITY.encode()


class OpenAiSurface:
    """Reads requests of the OpenAI surface, and of those that are translated into it."""

    def __init__(
        self, config: RouterConfig, fleet: FleetState, unix_clock: Callable[[], float]
    ) -> None:
        """Take what the house shares; the clock is asked at the edge, here."""
        self.unix_clock = unix_clock
        self._config = config
        self._fleet = fleet
        self._admitted = AuthenticationCache()

    def key_of(self, fields: Fields) -> KeyEntry:
        """Return whose request this is before its body is read, or raise ApiError 401."""
        shown = fields.get(b"authorization", b"")
        return self._admitted.authenticate(self._fleet.directory.keys, shown, self.unix_clock())

    def deployment(self, name: str, key: KeyEntry) -> DeploymentEntry:
        """Return the deployment of that name, or raise ApiError 404, also where it is forbidden."""
        entry = self._fleet.directory.deployment(name)
        if entry is None or not may_use(key, name):
            usable = (
                one.name for one in self._fleet.directory.deployments if may_use(key, one.name)
            )
            named = ", ".join(islice(usable, MODELS_NAMED)) or "none"
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"cannot find the model {name!r}: it does not exist, or this key may not use it;"
                f" models for this key (GET /v1/models): {named}",
                param="model",
            )
        return entry

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
            started_at=self.unix_clock(),
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


def _prefix_keys(prompt: bytes, key: KeyEntry, deployment: DeploymentEntry) -> PrefixKeys:
    if len(prompt) < BLOCK_BYTES:
        return NO_KEYS
    # Caches are kept apart by tenant: so are the keys.
    return prefix_keys(prompt, hash64(f"{key.tenant_id}\0{deployment.deployment_id}"))


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
