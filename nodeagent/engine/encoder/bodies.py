"""Bodies of `/v1/embeddings` (OpenAI's) and `/v1/rerank` (Cohere's and Jina's), and their answers.

Rule: what the model cannot do is refused in words, never silently ignored.
"""

import base64
import uuid
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from nodeagent.engine.server.request_body import refused

INPUTS_MAX: Final = 2048
DOCUMENTS_MAX: Final = 1024


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=1_000_000)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: Literal[True] | None = None
    truncate_prompt_tokens: None = None


class Document(msgspec.Struct):
    """A document that comes with more than its text."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """`POST /v1/rerank`."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False


embedding_decoder: Final = msgspec.json.Decoder(EmbeddingBody)
rerank_decoder: Final = msgspec.json.Decoder(RerankBody)


def inputs_of(body: EmbeddingBody) -> list[str] | list[list[int]]:
    """Return the inputs: all texts, or all lists of token ids."""
    given: Any = body.input
    if isinstance(given, str) or all(type(item) is int for item in given):
        given = [given]
    if len(given) > INPUTS_MAX:
        raise refused("input", f"cannot embed {len(given)} inputs: {INPUTS_MAX} are the most")
    texts = all(isinstance(item, str) for item in given)
    if not texts and not all(isinstance(item, list) for item in given):
        raise refused(
            "input", "cannot read input: it must be texts only, or lists of token ids only"
        )
    empty = next((at for at, item in enumerate(given) if not item), None)
    if empty is not None:
        raise refused("input", f"cannot embed input {empty}: it is empty")
    return list(given)


def documents_of(body: RerankBody) -> list[str]:
    """Return the documents' texts."""
    return [one if isinstance(one, str) else one.text for one in body.documents]


def embeddings_answer(rows: np.ndarray, model: str, tokens: int, *, packed: bool) -> bytes:
    """Return the body of an answer; `packed` vectors are little-endian fp32 in base64."""
    vectors = rows.astype("<f4")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.tobytes()).decode() if packed else row.tolist(),
        }
        for index, row in enumerate(vectors)
    ]
    body = {"object": "list", "data": data, "model": model, "usage": _usage(tokens)}
    return msgspec.json.encode(body)


def rerank_answer(scores: np.ndarray, body: RerankBody, model: str, tokens: int) -> bytes:
    """Return the body of an answer: documents by falling relevance."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    results: list[dict[str, Any]] = []
    for at in order[: body.top_n]:
        result: dict[str, Any] = {"index": at, "relevance_score": float(scores[at])}
        if body.return_documents:
            document = body.documents[at]
            text = document if isinstance(document, str) else document.text
            result["document"] = {"text": text}
        results.append(result)
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results}
    return msgspec.json.encode({**answer, "usage": _usage(tokens)})


def _usage(tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}
