"""Bodies of `/v1/embeddings` (OpenAI's), `/v1/rerank` (Cohere's and Jina's), `/classify` (vLLM's).

A field that the model cannot honour is refused, never ignored.
"""

import base64
import time
import uuid
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from nodeagent.engine.server.openai.request_errors import invalid_request

INPUTS_MAX: Final = 2048
DOCUMENTS_MAX: Final = 1024


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=1_000_000)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: Literal[True] | None = None
    truncate_prompt_tokens: None = None
    user: Any = None
    options: Any = None
    """The router's own options."""


class RerankDocument(msgspec.Struct):
    """A document given as an object, which may have fields beside its text."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/rerank`."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    user: Any = None
    options: Any = None
    """The router's own options."""


class ClassifyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /classify`, as in vLLM."""

    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[
            list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=INPUTS_MAX)
        ]
    )
    model: str | None = None
    user: Any = None
    options: Any = None
    """The router's own options."""


classify_decoder: Final = msgspec.json.Decoder(ClassifyBody)
embedding_decoder: Final = msgspec.json.Decoder(EmbeddingBody)
rerank_decoder: Final = msgspec.json.Decoder(RerankBody)


def embedding_inputs(body: EmbeddingBody) -> list[str] | list[list[int]]:
    """Return the inputs: all as texts, or all as lists of token ids. Raises ApiError."""
    inputs: Any = body.input
    if isinstance(inputs, str) or all(type(item) is int for item in inputs):
        inputs = [inputs]
    if len(inputs) > INPUTS_MAX:
        raise invalid_request(
            "input", f"cannot use field 'input': {len(inputs)} inputs, the limit is {INPUTS_MAX}"
        )
    are_texts = all(isinstance(item, str) for item in inputs)
    if not are_texts and not all(isinstance(item, list) for item in inputs):
        raise invalid_request(
            "input", "cannot use field 'input': expected only texts, or only lists of token ids"
        )
    empty = next((index for index, item in enumerate(inputs) if not item), None)
    if empty is not None:
        raise invalid_request("input", f"cannot use field 'input': input {empty} is empty")
    return list(inputs)


def embeddings_body(rows: np.ndarray, model: str, tokens: int, *, is_base64: bool) -> bytes:
    """Return the response body with one vector per row of `rows`.

    With `is_base64` a vector is base64 of little-endian fp32.
    """
    vectors = rows.astype("<f4")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist(),
        }
        for index, row in enumerate(vectors)
    ]
    body = {"object": "list", "data": data, "model": model, "usage": _usage(tokens)}
    return msgspec.json.encode(body)


def probabilities(logits: np.ndarray, *, is_multi_label: bool) -> np.ndarray:
    """Return the probability of each class [texts, labels]: of each alone, or of one of them."""
    logits = logits.astype(np.float64)
    if is_multi_label:
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def classify_body(rows: np.ndarray, labels: tuple[str, ...], model: str, tokens: int) -> bytes:
    """Return the response body with the likeliest class of each text, and all probabilities."""
    data = [
        {
            "index": index,
            "label": labels[int(np.argmax(row))],
            "probs": row.tolist(),
            "num_classes": len(labels),
        }
        for index, row in enumerate(rows)
    ]
    answer = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "model": model, "data": data}
    return msgspec.json.encode({**answer, "created": int(time.time()), "usage": _usage(tokens)})


def rerank_body(scores: np.ndarray, body: RerankBody, model: str, tokens: int) -> bytes:
    """Return the response body: the documents in order of falling relevance."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents:
            document = body.documents[index]
            text = document if isinstance(document, str) else document.text
            result["document"] = {"text": text}
        results.append(result)
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results}
    return msgspec.json.encode({**answer, "usage": _usage(tokens)})


def _usage(tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}
