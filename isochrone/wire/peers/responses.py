"""Stored responses between routers and the scheduler, over HTTP beside the control connection.

A router begins a response before it promises it to a client, and finishes it before it sends the
last event. Background responses are leased by routers, like items of batches. A response ends once,
whichever router finishes it, so every message may be repeated.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from isochrone.wire.ids import KeyId, TenantId

BEGIN_PATH: Final = "/v1/response-service/begin"
FINISH_PATH: Final = "/v1/response-service/finish"
LEASE_PATH: Final = "/v1/response-service/lease"

LEASED_MAX: Final = 256
"""The most responses that one message may request or renew."""

MESSAGE_BYTES_MAX: Final = 48 * 1024 * 1024
"""The largest message: a response with its request, or leased responses."""


class BeginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A router stores a response that it is about to answer, or that is to be answered later.

    `body` is the response and `input_items` its own input, both JSON. `run` is what a router needs
    to answer it in the background: routers alone read it, and it is empty otherwise.
    """

    response_id: str
    tenant_id: TenantId
    key_id: KeyId
    body: bytes
    input_items: bytes
    run: bytes = b""
    previous_response_id: str = ""
    conversation_id: str = ""
    is_stored: bool = True
    """False if only what it builds on is wanted."""


class BegunResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response is stored. `context_items` is a JSON array of the items before its input."""

    context_items: bytes
    lease_id: str = ""


class ResponseRef(msgspec.Struct, frozen=True, array_like=True):
    """One response that a router answers."""

    response_id: str
    lease_id: str


class FinishResponse(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended: `body` is JSON, `status` one of OpenAI's final ones.

    With `retry_after_s` it has not ended but is to be tried again then; `counts_as_attempt` is true
    if the response may be at fault.
    """

    ref: ResponseRef
    status: str = ""
    body: bytes = b""
    retry_after_s: float = 0.0
    counts_as_attempt: bool = False


class FinishedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the end was stored; false if it had ended before, or is deleted."""

    is_stored: bool


class LeaseResponses(msgspec.Struct, frozen=True, kw_only=True):
    """A router asks for up to `wanted` background responses. It still answers those it `holds`."""

    wanted: Annotated[int, Meta(ge=0, le=LEASED_MAX)] = 0
    holds: Annotated[tuple[ResponseRef, ...], Meta(max_length=100_000)] = ()


class LeasedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One background response to answer on behalf of a key.

    With `is_key_valid` a router that does not know the key yet will soon.
    """

    ref: ResponseRef
    tenant_id: TenantId
    key_id: KeyId
    body: bytes
    context_items: bytes
    run: bytes
    is_key_valid: bool = False


class LeasedResponses(msgspec.Struct, frozen=True, kw_only=True):
    """The responses newly leased to a router, and those that it has lost and need not answer."""

    responses: tuple[LeasedResponse, ...] = ()
    lost: tuple[ResponseRef, ...] = ()
