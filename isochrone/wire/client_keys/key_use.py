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


class KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """The use of one key in one turn. Tokens are negative if an earlier estimate was too high."""

    key_id: KeyId
    requests: Annotated[int, Meta(ge=0, le=10**9)]
    tokens: Annotated[int, Meta(ge=-(10**12), le=10**12)]


class FleetKeyUse(msgspec.Struct, frozen=True, tag="fleet_key_use"):
    """From a router: its own use. To a router: the use at all others, since the last message."""

    rows: Annotated[tuple[KeyUse, ...], Meta(max_length=KEY_USE_ROWS_MAX)]
