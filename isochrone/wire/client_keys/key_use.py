"""Messages by which routers share, through the scheduler, the use of keys with limits per minute.

Each router charges its own meters with a key's use at the other routers. No request waits for it: a
router without a scheduler knows its own use only.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from isochrone.wire.ids import KeyId

KEY_USE: Final = "key_use"
"""Capability of a router: it reads FleetKeyUse."""

KEY_USE_ROWS_MAX: Final = 4096
"""The most keys in one message."""

REQUESTS_MAX: Final = 10**9
TOKENS_MAX: Final = 10**12
"""The most use of one key in one message. A router cannot read a message with more."""


class KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """The use of one key in one turn. Tokens are negative if an earlier estimate was too high."""

    key_id: Annotated[KeyId, Meta(max_length=256)]
    requests: Annotated[int, Meta(ge=0, le=REQUESTS_MAX)]
    tokens: Annotated[int, Meta(ge=-TOKENS_MAX, le=TOKENS_MAX)]


class FleetKeyUse(msgspec.Struct, frozen=True, tag="fleet_key_use"):
    """From a router: its own use. To a router: the use at all others, since the last message."""

    rows: Annotated[tuple[KeyUse, ...], Meta(max_length=KEY_USE_ROWS_MAX)]
