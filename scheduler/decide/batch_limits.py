"""The limits of batches, of the batch service."""

import msgspec


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's batches, and on the silence of a router that holds items."""

    file_bytes_max: int = 200 * 1024 * 1024
    tenant_bytes_max: int = 10 * 1024 * 1024 * 1024  # all files of a tenant
    items_max: int = 1_000_000  # of one batch
    tenant_items_max: int = 2_000_000  # without an answer yet, in all batches of a tenant
    lease_s: float = 60.0  # items of a router that is silent this long go to others
