"""Tells that a connection failed because of this machine, and not because of the other end."""

import errno
import os
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL})
"""No descriptor is free, in this process or machine-wide, or no local port."""

LACKS_PORT: Final = os.strerror(errno.EADDRNOTAVAIL)
"""No local port is free for one remote address. Any other lack concerns every connection."""


def shortage(error: BaseException, *, is_bound: bool = False) -> str:
    """Return what is lacking on this machine, "" if an error has another cause.

    With `is_bound` the connection has a source address: then the error for a lack of ports is that
    of an address in use.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if number in SHORTAGES or (is_bound and number == errno.EADDRINUSE):
            return os.strerror(number or 0)
        cause = cause.__cause__
    return ""


def lacks_descriptors(error: BaseException) -> bool:
    """Return whether an error comes from a lack of descriptors, or of ports, on this machine."""
    return bool(shortage(error))
