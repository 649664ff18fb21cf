"""The limits of LoRA adapters."""

import msgspec


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's uploads. The defaults are those of Workers AI."""

    file_bytes_max: int = 500 * 1024 * 1024
    tenant_adapters_max: int = 30
    rank_max: int = 32
