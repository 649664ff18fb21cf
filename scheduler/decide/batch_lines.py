"""Reads the lines of a batch's input file: the request of each, or the error of that line. Pure."""

from collections.abc import Set
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.errors import MEANINGS, ErrorCode
from isochrone.wire.http.json_body import check_json_body

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
RUN_PREFIX: Final = "/ai/run/"
"""Before the model in the endpoint of requests that Workers AI's clients queued."""

CUSTOM_ID_CHARS_MAX: Final = 512
UNREADABLE: Final = "invalid_json_line"


class BatchLine(msgspec.Struct, frozen=True):
    """One line of an input file, as OpenAI defines it."""

    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class AnswerInLine(msgspec.Struct, frozen=True):
    """The answer to one request, in an output file."""

    status_code: int
    body: msgspec.Raw


class ResultLine(msgspec.Struct, frozen=True):
    """One line of an output or error file."""

    custom_id: str | None
    response: AnswerInLine | None
    error: dict[str, str] | None


class ParsedLine(NamedTuple):
    """A line's id and deployment; or its error, which answers it without a request."""

    custom_id: str = ""
    deployment: str = ""
    error_code: str = ""
    message: str = ""


_LINE: Final = msgspec.json.Decoder(BatchLine)
_RESULT: Final = msgspec.json.Decoder(ResultLine)
_TEXT: Final = msgspec.json.Decoder(str)
UNANSWERED_NUMBER: Final = 5000
"""The error number of a queued run that was cancelled, that expired, or that could not be read."""

_NUMBERS: Final = {code.value: MEANINGS[code].number for code in ErrorCode}
"""Workers AI's number of each error."""


def parse_line(
    line: bytes, endpoint: str, deployment: str, known_deployments: Set[str]
) -> ParsedLine:
    """Read one line of a batch for `endpoint`.

    `deployment` is that of the lines before, empty if there are none. A line may name an adapter,
    too (`deployment:adapter`): the router that answers it knows whether its tenant may use that.
    """
    try:
        check_json_body(line)
        given = _LINE.decode(line)
    except (ValueError, RecursionError) as error:
        reason = f"cannot read the line: {str(error)[:300]}"
        return ParsedLine(error_code=UNREADABLE, message=reason)
    custom_id = given.custom_id.replace("\0", "")[:CUSTOM_ID_CHARS_MAX]
    if custom_id != given.custom_id:
        # Its answer would have an id that the client does not know, perhaps another line's.
        message = (
            "cannot use 'custom_id': it contains a NUL, or has more than"
            f" {CUSTOM_ID_CHARS_MAX} characters"
        )
        return ParsedLine(custom_id, error_code="invalid_custom_id", message=message)
    if given.method != "POST":
        message = f"cannot use 'method' {given.method[:20]!r}: expected 'POST'"
        return ParsedLine(custom_id, error_code="invalid_method", message=message)
    if given.url != endpoint:
        message = f"cannot use 'url' {given.url[:60]!r}: this batch is for {endpoint!r}"
        return ParsedLine(custom_id, error_code="invalid_url", message=message)
    try:
        named = _TEXT.decode(given.body.get("model", b""))
    except msgspec.DecodeError:
        message = "cannot use 'body.model': expected the name of a model"
        return ParsedLine(custom_id, error_code="model_not_found", message=message)
    base = deployment_of(named, known_deployments)
    if not base:
        message = f"cannot find the model {named[:60]!r}: it does not exist"
        return ParsedLine(custom_id, error_code="model_not_found", message=message)
    if deployment and base != deployment:
        message = f"cannot use the model {named[:60]!r}: the lines before name {deployment!r}"
        return ParsedLine(custom_id, error_code="mismatched_model", message=message)
    if bytes(given.body.get("stream", b"false")) not in (b"false", b"null"):
        message = "cannot use 'body.stream': answers of a batch are not streamed"
        return ParsedLine(custom_id, error_code="invalid_request", message=message)
    return ParsedLine(custom_id, base)


def deployment_of(model: str, known: Set[str]) -> str:
    """Return the known deployment that `model` names, alone or as `deployment:adapter`; or ''."""
    if model in known:
        return model
    base = model.rpartition(":")[0]
    return base if base in known else ""


def request_body(line: bytes) -> bytes:
    """Return the body of the request in a line that `parse_line` accepted."""
    fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    return bytes(fields["body"])


def result_line(
    *, item_id: str, custom_id: str, status_code: int, request_id: str, body: bytes
) -> bytes:
    """Return the line of an output file for an answer, whether it is a success or an error.

    An engine may have answered with line breaks, or not with JSON: that becomes a text.
    """
    try:
        body.decode()  # `format` does not look at it, but clients do
        answer = msgspec.json.format(body, indent=-1)
    except (ValueError, RecursionError):
        answer = msgspec.json.encode(body.decode(errors="replace"))
    response = {"status_code": status_code, "request_id": request_id, "body": msgspec.Raw(answer)}
    line = {"id": item_id, "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"


def error_line(*, item_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an error file for an item that was not answered."""
    error = {"code": code, "message": message}
    line = {"id": item_id, "custom_id": custom_id or None, "response": None, "error": error}
    return msgspec.json.encode(line) + b"\n"


def run_response(line: bytes) -> dict[str, Any]:
    """Return Workers AI's response for a line of an output or error file.

    The custom id is the number of the request and the client's own reference.
    """
    given = _RESULT.decode(line)
    number, _, reference = (given.custom_id or "0 ").partition(" ")
    response = {"id": int(number), "external_reference": reference or None}
    if given.response is None:
        reason = given.error or {}
        code = _NUMBERS.get(reason.get("code", ""), UNANSWERED_NUMBER)
        error = {"code": code, "message": f"AiError: {reason.get('message')}"}
        return {**response, "result": None, "success": False, "errors": [error]}
    try:
        body = msgspec.json.decode(given.response.body)
    except (ValueError, RecursionError) as unreadable:
        body = f"cannot read the answer: {unreadable}"
    if not isinstance(body, dict) or "success" not in body:
        openai_error = (body.get("error") or {}) if isinstance(body, dict) else {"message": body}
        code = _NUMBERS.get(str(openai_error.get("code")), given.response.status_code)
        error = {"code": code, "message": f"AiError: {openai_error.get('message')}"}
        return {**response, "result": None, "success": False, "errors": [error]}
    return {
        **response,
        "result": body["result"],
        "success": body["success"],
        **({"errors": body["errors"]} if body["errors"] else {}),
    }
