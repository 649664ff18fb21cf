"""The OpenAI inference routes: from an HTTP request to the pipeline's InferenceRequest."""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import msgspec

from isochrone.native_class import mypyc_attr
from isochrone.ttft_order import TTFT_MS_MAX
from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.http import headers
from isochrone.wire.http.trace_context import parse_traceparent
from isochrone.wire.ids import RequestId
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry
from router.apis.linked_images.fetcher import ImageFetcher
from router.apis.media.schema import IMAGES_PATH, SPEECH_PATH, TRANSCRIPTIONS_PATH
from router.apis.openai.decode import (
    CHAT,
    CLASSIFY,
    COMPLETION,
    EMBEDDING,
    LINKED_CHAT,
    RERANK,
    determinism_of,
    named_as,
    refuse_storing,
    resume_body_builder,
    wants_usage,
    with_model,
    with_system_first,
    with_usage_requested,
    without_transfer_fields,
)
from router.apis.openai.engine_features import refuse_lacking, refuse_lacking_route
from router.apis.openai.images import check_images
from router.apis.openai.long_texts import ReadBody, read_body
from router.apis.openai.prompt import (
    OpenAiRequest,
    count_answers,
    count_text_bytes,
    has_parts,
    output_tokens_max,
)
from router.apis.openai.retired_models import refuse_retired
from router.apis.openai.schema import (
    CHAT_PATH,
    CLASSIFY_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    TOKENIZE_PATH,
    ChatRequest,
    CompletionRequest,
    LinkedChat,
)
from router.config import RouterConfig
from router.dataplane.http1 import HeaderFields
from router.dataplane.http_messages import HttpRequest
from router.decide.admission.authentication import AuthenticationCache, may_use
from router.decide.caches.affinity import SESSION_BYTES_MAX, hash64
from router.decide.caches.prefix_index import BLOCK_BYTES, NO_KEYS, PrefixKeys, prefix_keys
from router.fleet_state import FleetState
from router.inference_request import FetchImages, InferenceRequest

DECODERS: Final[dict[str, "msgspec.json.Decoder[Any]"]] = {
    CHAT_PATH: CHAT,
    COMPLETIONS_PATH: COMPLETION,
    EMBEDDINGS_PATH: EMBEDDING,
    RERANK_PATH: RERANK,
    CLASSIFY_PATH: CLASSIFY,
}
MODEL_KINDS: Final = {
    EMBEDDINGS_PATH: "embedding",
    RERANK_PATH: "rerank",
    CLASSIFY_PATH: "classify",
}
"""The kind of model that a route needs; all other routes need a chat model."""

ROUTES_OF_KINDS: Final = {
    "chat": CHAT_PATH,
    **{kind: path for path, kind in MODEL_KINDS.items()},
    "transcription": TRANSCRIPTIONS_PATH,
    "speech": SPEECH_PATH,
    "image": IMAGES_PATH,
}
"""A route for each kind of model, which the error for a model of another kind names."""

MODELS_NAMED: Final = 8
"""How many available models the error for an unknown model names."""

SESSION_AFFINITY: Final = headers.SESSION_AFFINITY.encode()
PRIORITY: Final = headers.PRIORITY.encode()
TTFT_MS: Final = headers.TTFT_MS.encode()
API_KEY: Final = headers.API_KEY.encode()
TRACEPARENT: Final = headers.TRACEPARENT.encode()


@mypyc_attr(acyclic=True, free_list_len=1)
class NamedModel:
    """The deployment, and the adapter if any, that a request's `model` names."""

    __slots__ = ("adapter", "deployment")

    def __init__(self, deployment: DeploymentEntry, adapter: AdapterEntry | None) -> None:
        self.deployment = deployment
        self.adapter = adapter


class OpenAiSurface:
    """Reads requests of the OpenAI surface, and those of other surfaces once translated to it."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: FleetState,
        unix_clock: Callable[[], float],
        image_fetcher: ImageFetcher | None = None,
    ) -> None:
        """Use the parts that the whole router shares. `unix_clock` returns Unix time in seconds.

        Without an `image_fetcher` links to images are refused.
        """
        self.image_fetcher = image_fetcher
        self.unix_clock = unix_clock
        self._config = config
        self._fleet = fleet
        self._admitted = AuthenticationCache()

    @property
    def may_link(self) -> bool:
        """Whether images may be links."""
        return self.image_fetcher is not None

    def key_of(self, fields: HeaderFields) -> KeyEntry:
        """Return the API key in a request's headers. Raises ApiError 401."""
        authorization = fields.get(b"authorization", b"")
        if not authorization and API_KEY in fields:
            authorization = b"Bearer " + fields[API_KEY]
        return self._admitted.authenticate(
            self._fleet.directory.keys, authorization, self.unix_clock()
        )

    def deployment(self, name: str, key: KeyEntry) -> DeploymentEntry:
        """Return a deployment. Raises ApiError 404, also if the key may not use it."""
        entry = self._fleet.directory.deployment(name)
        if entry is None or not may_use(key, entry):
            deployments = self._fleet.directory.deployments
            usable = (known.name for known in deployments if may_use(key, known))
            named = ", ".join(islice(usable, MODELS_NAMED)) or "none"
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"cannot find the model {name!r}: it does not exist or this key may not use it;"
                f" models for this key (GET /v1/models): {named}",
                param="model",
            )
        return entry

    def base_deployment(self, model: str, key: KeyEntry) -> DeploymentEntry:
        """Return the deployment in `model`, also in `deployment:adapter`. Raises ApiError 404."""
        return self.deployment(self._fleet.directory.base_of(model), key)

    def refuse_retired(self, deployment: DeploymentEntry) -> None:
        """Raise ApiError 410 if the operator has retired a deployment."""
        if deployment.deprecation is not None:
            refuse_retired(deployment, deployment.deprecation, self.unix_clock())

    def only_deployment(self, kind: str, key: KeyEntry) -> DeploymentEntry:
        """Return the only deployment of a kind that a key may use. Raises ApiError 400."""
        found = [
            entry
            for entry in self._fleet.directory.deployments
            if entry.kind == kind and may_use(key, entry)
        ]
        if len(found) != 1:
            names = ", ".join(entry.name for entry in found[:MODELS_NAMED]) or "none"
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot choose a model: name one in 'model'; those of kind {kind!r} for this key:"
                f" {names}",
                param="model",
            )
        return found[0]

    def read(
        self,
        request: HttpRequest,
        path: str,
        body: bytes,
        encode_error_event: Callable[[ApiError], bytes],
        messages_field: str = "",
    ) -> InferenceRequest:
        """Return the inference request of an HTTP request. Raises ApiError if it is invalid.

        `path` and `body` are OpenAI's, also if the client used another surface, where
        `messages_field` has the messages.
        """
        key = request.key
        assert key is not None
        read = self._read_body(path, body)
        openai, prompt = read.request, read.prompt
        kind = MODEL_KINDS.get(path, "chat")
        named = self._named_model(openai.model, key, request.named_path, kind)
        deployment, adapter = named.deployment, named.adapter
        if deployment.engine_lacks:
            refuse_lacking(deployment, path, body)
        fetch_images = None
        if isinstance(openai, ChatRequest):
            refuse_storing(openai.store)
            fetch_images = self._check_images(openai, read, deployment, key, messages_field)
            body = with_system_first(body, openai)
        body = with_usage_requested(without_transfer_fields(body, openai), openai)
        answer_count = count_answers(openai)
        return InferenceRequest(
            request_id=RequestId(request.request_id),
            client_request_id=request.client_request_id,
            key=key,
            deployment=deployment,
            path=path,
            body=body,
            text_bytes=count_text_bytes(openai, len(prompt)),
            answer_count=answer_count,
            output_tokens_max=self._output_tokens(openai, answer_count, deployment),
            is_stream=bool(openai.stream),
            wants_usage=wants_usage(openai),
            session=_session(request, key, openai),
            reject_if_busy=openai.options is not None and openai.options.reject_if_busy,
            arrived_s=request.arrived_s,
            started_at=self.unix_clock(),
            encode_error_event=encode_error_event,
            build_resume_body=resume_body_builder(openai) if openai.stream else None,
            determinism=determinism_of(openai) if openai.stream else "",
            prefix_keys=_prefix_keys(prompt, key, deployment, adapter),
            relayed_headers=relayed_headers(request, service_tier_of(openai)),
            traceparent=traceparent_of(request),
            adapter=adapter,
            ttft_ms=ttft_ms_of(request),
            fetch_images=fetch_images,
        )

    def read_translated(
        self,
        request: HttpRequest,
        body: bytes,
        encode_error_event: Callable[[ApiError], bytes],
        messages_field: str,
    ) -> InferenceRequest:
        """Read a chat that was made of another API's request, where `messages_field` has its text.

        Raises ApiError, in terms of that field.
        """
        with named_as(messages_field):
            return self.read(request, CHAT_PATH, body, encode_error_event, messages_field)

    def read_count(
        self, request: HttpRequest, body: bytes, messages_field: str
    ) -> InferenceRequest:
        """Return the request for the number of tokens of a chat. Raises ApiError if it is invalid.

        `body` is a chat's, made of a request with `messages_field`. The request is counted, and
        uses no tokens.
        """
        key = request.key
        assert key is not None
        with named_as(messages_field):
            read = self._read_body(CHAT_PATH, body)
        openai = read.request
        assert isinstance(openai, ChatRequest)
        deployment = self._named_model(openai.model, key, request.named_path, "chat").deployment
        refuse_lacking_route(deployment, "token_count")
        with named_as(messages_field):
            refuse_lacking(deployment, CHAT_PATH, body)
            # Engines read images to count their tokens.
            fetch_images = self._check_images(openai, read, deployment, key, messages_field)
        if openai.model != deployment.name:
            # An adapter has its model's tokens.
            body = with_model(body, deployment.name)
        return InferenceRequest(
            request_id=RequestId(request.request_id),
            client_request_id=request.client_request_id,
            key=key,
            deployment=deployment,
            path=TOKENIZE_PATH,
            body=body,
            arrived_s=request.arrived_s,
            started_at=self.unix_clock(),
            encode_error_event=openai_error_event,
            fetch_images=fetch_images,
        )

    def _read_body(self, path: str, body: bytes) -> ReadBody:
        """Decode a body, also one with links if they are fetched. Raises ApiError 400."""
        try:
            return read_body(body, DECODERS[path])
        except ApiError:
            if self.image_fetcher is None or path != CHAT_PATH or b"https:" not in body:
                raise
            return read_body(body, LINKED_CHAT)

    def _check_images(
        self,
        chat: ChatRequest,
        read: ReadBody,
        deployment: DeploymentEntry,
        key: KeyEntry,
        messages_field: str,
    ) -> FetchImages | None:
        """Check a chat's images; return what fetches those that it links to. Raises ApiError."""
        if not has_parts(chat):
            return None
        check = check_images(chat, self._config.image_pixels_max, read.images)
        if self.image_fetcher is None or not isinstance(chat, LinkedChat):
            return None
        refuse_lacking_route(deployment, "images")
        return self.image_fetcher.completion(check, key, messages_field)

    def _named_model(self, name: str, key: KeyEntry, path: str, kind: str) -> NamedModel:
        """Return the deployment of a kind, and perhaps the adapter, that a request names.

        A `name` is a deployment's, or `deployment:adapter`; `path` is the client's. Raises
        ApiError.
        """
        directory = self._fleet.directory
        base = directory.base_of(name)
        deployment = self.deployment_of_kind(base, key, path, kind)
        adapter = None
        if base != name:
            adapter_name = name[len(base) + 1 :]
            adapter = directory.adapters.find(adapter_name, key.tenant_id, deployment)
        return NamedModel(deployment, adapter)

    def deployment_of_kind(self, name: str, key: KeyEntry, path: str, kind: str) -> DeploymentEntry:
        """Return a deployment of the kind that a client's request to `path` needs.

        Raises ApiError.
        """
        deployment = self.deployment(name, key)
        if deployment.kind != kind:
            raise ApiError(
                ErrorCode.WRONG_MODEL_KIND,
                f"cannot use the model {name!r} with {path}: it is a model of kind"
                f" {deployment.kind!r}, for {ROUTES_OF_KINDS.get(deployment.kind, 'other routes')},"
                f" and this route needs one of kind {kind!r}",
                param="model",
            )
        self.refuse_retired(deployment)
        return deployment

    def _output_tokens(
        self, openai: OpenAiRequest, answer_count: int, deployment: DeploymentEntry
    ) -> int:
        """Return the most tokens that all answers may have, assuming a limit if there is none."""
        limit = output_tokens_max(openai)
        if limit is None:
            limit = self._config.output_tokens_assumed
        return max(1, min(limit, deployment.context_tokens) * answer_count)


def _prefix_keys(
    prompt: bytes, key: KeyEntry, deployment: DeploymentEntry, adapter: AdapterEntry | None
) -> PrefixKeys:
    if len(prompt) < BLOCK_BYTES:
        return NO_KEYS
    # Prefix caches are separated by tenant and adapter, and so are the keys.
    subject = f"{key.tenant_id}\0{deployment.deployment_id}"
    if adapter is not None:
        subject += f"\0{adapter.adapter_id}"
    return prefix_keys(prompt, hash64(subject))


def _session(request: HttpRequest, key: KeyEntry, openai: OpenAiRequest) -> str:
    session = request.header(SESSION_AFFINITY).strip()
    if not session and isinstance(openai, ChatRequest) and openai.prompt_cache_key:
        session = openai.prompt_cache_key
        if len(session) > SESSION_BYTES_MAX:
            # Its form is the client's; which keys are equal is all that matters.
            session = f"{hash64(session):x}"
    if len(session) > SESSION_BYTES_MAX:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use the header {headers.SESSION_AFFINITY}: it has more than"
            f" {SESSION_BYTES_MAX} bytes",
            param=headers.SESSION_AFFINITY,
        )
    # Session names belong to a tenant: two tenants may use the same name.
    return f"{key.tenant_id}/{session}" if session else ""


def ttft_ms_of(request: HttpRequest) -> int:
    """Return within how many ms the client needs the first token, 0 if it does not say.

    Raises ApiError 400.
    """
    value = request.header(TTFT_MS)
    if not value:
        return 0
    is_number = value.isascii() and value.isdecimal() and len(value) <= 9
    if not is_number or not 1 <= int(value) <= TTFT_MS_MAX:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use the header {headers.TTFT_MS}: expected 1 to {TTFT_MS_MAX} milliseconds,"
            f" got {value[:40]!r}",
            param=headers.TTFT_MS,
        )
    return int(value)


def service_tier_of(openai: OpenAiRequest) -> str:
    """Return a request's `service_tier`, or ""."""
    if isinstance(openai, ChatRequest) or isinstance(openai, CompletionRequest):  # noqa: SIM101 - a union would be made for each request
        return openai.service_tier or ""
    return ""


def traceparent_of(request: HttpRequest) -> str:
    """Return the client's position in its trace, "" if it sent none or a malformed one."""
    value = request.header(TRACEPARENT)
    return value if value and parse_traceparent(value) is not None else ""


def relayed_headers(request: HttpRequest, service_tier: str = "") -> str:
    """Return the header lines of the client's priority and session. Raises ApiError 400."""
    lines, priority = "", request.header(PRIORITY)
    if not priority and service_tier == "flex":
        priority = headers.PRIORITY_LOWEST
    if priority:
        if (
            not (priority.isascii() and priority.isdecimal())
            or len(priority) > 2
            or int(priority) > headers.PRIORITY_DEFAULT
        ):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use the header {headers.PRIORITY}: expected 0 to"
                f" {headers.PRIORITY_DEFAULT}, got {priority[:40]!r}",
                param=headers.PRIORITY,
            )
        lines = f"{headers.PRIORITY}: {priority}\r\n"
    session = request.header(SESSION_AFFINITY)
    if session and session.isascii() and session.isprintable():
        lines += f"{headers.SESSION_AFFINITY}: {session}\r\n"
    return lines
