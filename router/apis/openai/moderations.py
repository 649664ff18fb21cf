"""`/v1/moderations`, answered by a deployment that classifies.

OpenAI's categories get the scores of the labels that mean the same. Other labels become additional
categories. A category that the model does not know is false, with score 0.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.decode import decode
from router.apis.openai.schema import CLASSIFY_PATH, DataUrl, MediaReference, ModelField
from router.apis.openai.surface import OpenAiSurface
from router.apis.translating_writer import TranslatingWriter
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

MODERATIONS_PATH: Final = "/v1/moderations"
FLAGGED_FROM: Final = 0.5
"""A text is flagged if a label that is not neutral has this score."""

CATEGORIES: Final = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening"),
    *("illicit", "illicit/violent", "self-harm", "self-harm/instructions", "self-harm/intent"),
    *("sexual", "sexual/minors", "violence", "violence/graphic"),
)
_NEUTRAL: Final = frozenset(
    {
        *("ok", "safe", "neutral", "none", "normal", "clean", "benign", "harmless", "nothate"),
        *("nontoxic", "nottoxic", "nonhate", "noharm", "notflagged", "unflagged", "acceptable"),
    }
)
"""Labels that flag nothing, in lower case and without other signs."""

_SHORT_NAMES: Final = {
    "h": "hate", "h2": "hate/threatening", "hr": "harassment", "s": "sexual",
    "s3": "sexual/minors", "sh": "self-harm", "v": "violence", "v2": "violence/graphic",
}  # fmt: skip
"""Labels of KoalaAI's Text-Moderation."""

LABELS_KEPT_MAX: Final = 1024
"""The labels whose categories are kept: an answer has each of a model's labels for each text."""

_UNNAMED: Final = "label"


class ModerationPart(msgspec.Struct, frozen=True):
    """A part of an input with images. Parts are one input together."""

    type: Literal["text", "image_url"]
    text: Annotated[str, Meta(min_length=1)] | None = None
    image_url: DataUrl | MediaReference | None = None


class ModerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/moderations`. Without `model`, the only deployment that classifies."""

    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[str | ModerationPart], Meta(min_length=1, max_length=2048)]
    )
    model: ModelField | None = None


class ClassScores(msgspec.Struct):
    """The probabilities of one text."""

    probs: list[float]
    label: str | None = None


class ClassifyAnswer(msgspec.Struct):
    """The answer of `/classify`."""

    data: Annotated[list[ClassScores], Meta(min_length=1)]


_REQUEST: Final = msgspec.json.Decoder(ModerationRequest)
_ANSWER: Final = msgspec.json.Decoder(ClassifyAnswer)


def read_moderation_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return the request to classify, and a writer that translates its answer. Raises ApiError."""
    moderation, key = decode(request.body, _REQUEST), request.key
    assert key is not None
    if moderation.model is None:
        deployment = openai.only_deployment("classify", key)
    else:
        deployment = openai.deployment(moderation.model, key)
    body = msgspec.json.encode({"model": deployment.name, "input": _texts(moderation)})
    inference = openai.read(request, CLASSIFY_PATH, body, openai_error_event)
    _check_labels(deployment)
    translating = TranslatingWriter(
        writer,
        translate_frame=bytes,
        translate_body=partial(
            moderation_body, deployment=deployment, request_id=request.client_request_id
        ),
        translate_refusal=bytes,
    )
    return inference, translating


def moderation_body(body: bytes, *, deployment: DeploymentEntry, request_id: str) -> bytes:
    """Translate the answer of `/classify`. Raises ApiError if it is none."""
    results = [
        moderation_result(_scores(item, deployment.labels)) for item in _decode_answer(body).data
    ]
    answer = {"id": f"modr-{request_id}", "model": deployment.name, "results": results}
    return msgspec.json.encode(answer)


def moderation_result(scores: dict[str, float]) -> dict[str, Any]:
    """Return the moderation of one text by the scores of the model's labels."""
    by_category = dict.fromkeys(CATEGORIES, 0.0)
    for label, score in scores.items():
        category = category_of(label)
        if category is not None:
            by_category[category] = max(score, by_category.get(category, 0.0))
    flags = {name: score >= FLAGGED_FROM for name, score in by_category.items()}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": by_category,
        "category_applied_input_types": {name: ["text"] for name in by_category},
    }


@lru_cache(LABELS_KEPT_MAX)
def category_of(label: str) -> str | None:
    """Return OpenAI's category of the same meaning as a label, else the label; None if neutral."""
    plain = _plain(label)
    if plain in _NEUTRAL:
        return None
    named = {_plain(category): category for category in CATEGORIES} | _SHORT_NAMES
    return named.get(plain, label)


def classes_of(body: bytes, labels: Sequence[str]) -> bytes:
    """Translate the answer of `/classify` for one text to Workers AI's: best first."""
    scores = _scores(_decode_answer(body).data[0], labels)
    ranked = sorted(scores.items(), key=lambda scored: -scored[1])
    return msgspec.json.encode([{"label": label, "score": score} for label, score in ranked])


def _texts(moderation: ModerationRequest) -> list[str]:
    """Return the texts to classify, each of which gets a result. Raises ApiError 400."""
    if isinstance(moderation.input, str):
        return [moderation.input]
    parts = [item for item in moderation.input if isinstance(item, ModerationPart)]
    texts = [item for item in moderation.input if isinstance(item, str)]
    if not parts and all(texts):
        return texts
    if texts or any(part.type != "text" or not part.text for part in parts):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot use field 'input': expected texts that are not empty, or only parts of type"
            " text; models that classify read no images",
            param="input",
        )
    return ["\n".join(part.text or "" for part in parts)]


def _check_labels(deployment: DeploymentEntry) -> None:
    """Raise ApiError 400 if nothing says what the model's classes mean."""
    if not deployment.labels or all(
        _plain(name).startswith(_UNNAMED) for name in deployment.labels
    ):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot moderate with the model {deployment.name!r}: its labels have no names (they"
            " are read from its config.json by `isochrone models add`)",
            param="model",
        )


def _scores(item: ClassScores, labels: Sequence[str]) -> dict[str, float]:
    """Return the probability of each label; labels without a name are numbered."""
    if len(labels) != len(item.probs):
        labels = [f"LABEL_{number}" for number in range(len(item.probs))]
    return dict(zip(labels, item.probs, strict=True))


def _decode_answer(body: bytes) -> ClassifyAnswer:
    try:
        return _ANSWER.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(
            ErrorCode.UPSTREAM, "cannot answer: the replica did not classify the text"
        ) from error


def _plain(label: str) -> str:
    return "".join(sign for sign in label.lower() if sign.isalnum())
