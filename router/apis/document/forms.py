"""The forms of the routes that take files: their fields beside the files."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class FileForm(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/files`."""

    purpose: Literal["batch"]
    expires_after_anchor: Literal["created_at"] | None = msgspec.field(
        default=None, name="expires_after[anchor]"
    )
    expires_after_seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | None = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class AdapterForm(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /ai/finetunes/{finetune}/finetune-assets`."""

    file_name: Literal["adapter_config.json", "adapter_model.safetensors"]


class NoFields(msgspec.Struct, frozen=True):
    """A form with files alone."""
