"""The limits of batches, of the batch service."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's batches, and on the silence of a router that holds items."""

    file_bytes_max: Count = 200 * 1024 * 1024
    tenant_bytes_max: Count = 10 * 1024 * 1024 * 1024  # all files of a tenant
    tenant_files_max: Count = 500_000  # results among them
    tenant_batches_max: Count = 5_000  # that have not ended, queued runs among them
    items_max: Count = 1_000_000  # of one batch
    tenant_items_max: Count = 2_000_000  # without an answer yet, in all batches of a tenant
    # Items of a router that is silent this long go to others.
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
