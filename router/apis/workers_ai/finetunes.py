"""`/ai/finetunes`: LoRA adapters, relayed to the scheduler on behalf of an authenticated key."""

import re
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode, method_not_allowed
from isochrone.wire.http import headers
from router.apis.openai.decode import decode
from router.apis.openai.surface import OpenAiSurface
from router.apis.relay import body_of, content_type_of, in_a_task, stored_bytes_of
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.scheduler_client import SchedulerClient

_BELOW_ACCOUNT: Final = re.compile(
    r"^(?:/client/v4/accounts/[^/]{1,64})?"
    r"(/ai/finetunes(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:/finetune-assets)?)?)$"
)
"""An adapter's name or id begins with a letter or digit: `..` would lead to another route of the
scheduler's."""

_CREATE: Final = "/ai/finetunes"
_ASSETS: Final = "/finetune-assets"
_PUBLIC: Final = "/ai/finetunes/public"


class _FinetuneModel(msgspec.Struct, frozen=True):
    model: str


_MODEL: Final = msgspec.json.Decoder(_FinetuneModel)


def finetune_path(path: str) -> str:
    """Return the path of such a route without the account before it; empty for other paths."""
    match = _BELOW_ACCOUNT.match(path)
    return match.group(1) if match else ""


async def relay_finetunes(
    client: SchedulerClient,
    surface: OpenAiSurface,
    path: str,
    request: HttpRequest,
    writer: ResponseWriter,
) -> None:
    """Answer a request with the scheduler's answer. Raises ApiError. An inline task."""
    method = request.method.decode()
    allowed = _allowed(path)
    if method not in allowed:
        raise method_not_allowed(method, request.named_path, allowed)
    if not client.access.has_batches:
        raise ApiError(
            ErrorCode.UNAVAILABLE,
            "cannot use adapters: the operator must set `batch_folder` or `batch_bucket` in the"
            " configuration of all schedulers",
        )
    key = request.key
    assert key is not None
    if method == "POST" and path == _CREATE:
        surface.deployment(decode(request.body, _MODEL).model, key)
    await in_a_task(_relay(client, path, request, writer))


def _allowed(path: str) -> tuple[str, ...]:
    if path == _CREATE:
        return ("GET", "POST")
    if path == _PUBLIC:
        return ("GET",)
    return ("POST",) if path.endswith(_ASSETS) else ("DELETE",)


async def _relay(
    client: SchedulerClient, path: str, request: HttpRequest, writer: ResponseWriter
) -> None:
    key = request.key
    assert key is not None
    with body_of(request) as body:
        async with client.relay(
            key,
            request.method.decode(),
            path,
            headers=content_type_of(request),
            query=request.query,
            body=body,
            stored_bytes=stored_bytes_of(request),
        ) as response:
            answer = await response.read()
    header_lines = f"{headers.REQUEST_ID}: {request.client_request_id}\r\n"
    writer.reply(HttpResponse(response.status, answer, header_lines))
