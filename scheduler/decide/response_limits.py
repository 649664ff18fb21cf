"""The limits of stored responses and conversations."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class ResponseLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's responses and their age, and on a router's silence."""

    keep_days: Positive = 30.0  # responses since they began, conversations since their last item
    tenant_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = (
        256 * 1024 * 1024
    )  # of both; 0: no storing
    tenant_count_max: Count = 10_000  # responses and conversations, each
    context_bytes_max: Count = 8 * 1024 * 1024  # all items that one response may build on
    conversation_items_max: Count = 10_000
    attempts_max: Count = 5  # of a background response whose engine fails
    lease_s: Positive = 60.0  # responses of a router that is silent this long fail, or go to others
