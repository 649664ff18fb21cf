"""Bodies of public requests that routers relay, and values that their fields may have."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.models.model import ModelName
from isochrone.wire.peers.adapter import AdapterName

ITEMS_MAX: Final = 20
"""The most items that one request may add to a conversation."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The values of OpenAI's API, and of vLLM 0.32."""

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""OpenAI's limits. What a tenant stores is counted without its metadata."""


class CreateBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: None = None


class CreateConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/conversations`."""

    items: Annotated[list[msgspec.Raw], Meta(max_length=ITEMS_MAX)] | None = None
    metadata: Metadata | None = None


class UpdateConversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}`."""

    metadata: Metadata | None


class AddItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/conversations/{id}/items`."""

    items: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=ITEMS_MAX)]


class NewFinetune(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /ai/finetunes`: the description of an adapter."""

    model: ModelName
    name: AdapterName
    description: Annotated[str, Meta(max_length=1024)] | None = None
    public: bool | None = None
