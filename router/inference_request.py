"""A client's request as the pipeline takes it, whichever API surface it came through."""

from collections.abc import Awaitable, Callable
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import RequestId
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry
from router.dataplane.usage import UsageCount
from router.decide.caches.prefix_index import NO_KEYS, PrefixKeys

JSON: Final = "application/json"

CONTEXT_UNKNOWN_TOKENS: Final = 1 << 21
"""Assumed where the table does not say what the engine's context is: longer than any."""

NOTHING_LEFT: Final = b""
"""In place of the body for the rest of an answer that is as long as it may be."""

INPUT_BYTES_MIN: Final = 4
"""The least bytes of a body for each of several inputs: quotes, a letter and a comma."""

FetchImages = Callable[[bytes, Callable[[int], None]], Awaitable[bytes]]
"""Takes a body and a function that counts bytes which are held, and returns the body with the
images that it links to. Raises ApiError."""


@mypyc_attr(free_list_len=1)
class InferenceRequest:
    """One checked request for tokens.

    - `request_id` is unique; `client_request_id` is the id in the response, and may be repeated.
    - `body` and `path` go to the node. `text_bytes` is the size of the prompt's text.
    - `answer_count` is the number of alternative answers, `output_tokens_max` counts all of them.
    - `arrived_s` is monotonic, `started_at` is Unix time.
    - `relayed_headers` are the client's own header lines that the node gets, each checked.
    - `traceparent` is the client's own, in the form of the standard; empty if it sent none.
    - `encode_error_event` encodes an error as an event within a stream.
    - `build_resume_body(body, text, tokens)` returns a body that asks for the rest of the answer
      after `text`, which has `tokens` tokens, NOTHING_LEFT, or None. The attribute is None if the
      request cannot be resumed.
    - `fetch_images` completes `body` before a replica is chosen; None if it is complete.
    - `ttft_ms` is within how many ms the client needs the first token; 0 if it does not say.
    - `adapter` is the LoRA adapter of the deployment's model that the request names, if any.
    - `determinism` is `headers.GREEDY` or `headers.SEEDED` if every replica would generate the same
      tokens, else empty.
    - `on_prompt_tokens` gets the engine's count of the prompt's tokens before a stream, if the
      engine tells it then; None if that is not wanted.
    - `preemptions` is how often a node has preempted it, an item of a batch; -1 for other requests.
    - `content_type` is that of `body`. `is_media`: the answer is a sound, an image or what a sound
      says, of any content type. A stream of it is relayed unchanged and ends with its body.

    The defaults are those of a request that only counts tokens.
    """

    __slots__ = (
        "_price", "adapter", "answer_count", "arrived_s", "body", "build_resume_body",
        "client_request_id", "content_type", "deployment", "deployment_id", "determinism",
        "encode_error_event", "fetch_images", "is_media", "is_stream", "key", "on_prompt_tokens",
        "output_tokens_max", "path", "preemptions", "prefix_keys", "regions", "reject_if_busy",
        "relayed_headers", "request_id", "session", "started_at", "tenant_id", "text_bytes",
        "traceparent", "ttft_ms", "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: RequestId,
        client_request_id: str,
        key: KeyEntry,
        deployment: DeploymentEntry,
        path: str,
        body: bytes,
        arrived_s: float,
        started_at: float,
        encode_error_event: Callable[[ApiError], bytes],
        text_bytes: int = 0,
        answer_count: int = 1,
        output_tokens_max: int = 1,
        is_stream: bool = False,
        wants_usage: bool = False,
        session: str = "",
        reject_if_busy: bool = False,
        build_resume_body: Callable[[bytes, str, int], bytes | None] | None = None,
        determinism: str = "",
        prefix_keys: PrefixKeys = NO_KEYS,
        relayed_headers: str = "",
        traceparent: str = "",
        adapter: AdapterEntry | None = None,
        content_type: str = JSON,
        is_media: bool = False,
        ttft_ms: int = 0,
        fetch_images: FetchImages | None = None,
    ) -> None:
        self.request_id = request_id
        self.client_request_id = client_request_id
        self.key = key
        self.tenant_id, self.regions = key.tenant_id, key.regions
        self.deployment = deployment
        self.deployment_id = deployment.deployment_id
        self.path = path
        self.body = body
        self.text_bytes = text_bytes
        self.answer_count = answer_count
        self.output_tokens_max = output_tokens_max
        self.is_stream = is_stream
        self.wants_usage = wants_usage
        self.session = session
        self.reject_if_busy = reject_if_busy
        self.arrived_s = arrived_s
        self.started_at = started_at
        self.encode_error_event = encode_error_event
        self.build_resume_body = build_resume_body
        self.determinism = determinism
        self.prefix_keys = prefix_keys
        self.relayed_headers = relayed_headers
        self.traceparent = traceparent
        self.adapter = adapter
        self.content_type = content_type
        self.is_media = is_media
        self.ttft_ms = ttft_ms
        self.fetch_images = fetch_images
        self.on_prompt_tokens: Callable[[int], None] | None = None
        self.preemptions = -1
        self._price = deployment.price

    def usage_tokens_max(self) -> int:
        """Return the most tokens that a prompt, or its answers, can have.

        A node that reports more is wrong: one answer must not use up a tenant's quota.
        """
        context = self.deployment.context_tokens
        if self.deployment.rollout is not None:
            # That of the new version may be another.
            context = max(context, CONTEXT_UNKNOWN_TOKENS)
        if self.is_media:
            return CONTEXT_UNKNOWN_TOKENS * self.answer_count + len(self.body)
        if self.deployment.kind == "chat":
            return context * self.answer_count
        return context * (self.answer_count + len(self.body) // INPUT_BYTES_MIN)

    def cost(self, usage: UsageCount) -> float:
        """Return the cost of `usage` at the deployment's price; 0 without a price."""
        if self._price is None:
            return 0.0
        return self._price.spend(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
