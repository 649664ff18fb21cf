"""The limits of LoRA adapters."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's uploads. The defaults are those of Workers AI."""

    file_bytes_max: Count = 500 * 1024 * 1024
    tenant_adapters_max: Annotated[int, msgspec.Meta(ge=0)] = 30
    rank_max: Count = 32
