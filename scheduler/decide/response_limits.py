"""The limits of stored responses and conversations."""

import msgspec


class ResponseLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits on one tenant's responses and their age, and on a router's silence."""

    keep_days: float = 30.0  # responses since they began, conversations since their last item
    tenant_bytes_max: int = 256 * 1024 * 1024  # responses and conversations; 0: none are stored
    tenant_count_max: int = 10_000  # responses and conversations, each
    context_bytes_max: int = 8 * 1024 * 1024  # all items that one response may build on
    conversation_items_max: int = 10_000
    attempts_max: int = 5  # of a background response whose engine fails
    lease_s: float = 60.0  # responses of a router that is silent this long fail, or go to others
