"""A connection that fails for want of a descriptor or port is no fault of the other end."""

import errno
import os

import pytest

from isochrone.service.network.shortage import lacks_descriptors, shortage


@pytest.mark.parametrize(
    ("number", "is_bound", "is_ours"),
    [
        (errno.EMFILE, False, True),
        (errno.ENFILE, False, True),
        (errno.EADDRNOTAVAIL, False, True),
        (errno.EADDRINUSE, False, False),
        (errno.EADDRINUSE, True, True),
        (errno.ECONNREFUSED, True, False),
        (errno.ENETUNREACH, True, False),
    ],
)
def test_what_this_machine_lacks_is_told_from_faults_of_the_other_end(
    number: int, is_bound: bool, is_ours: bool
) -> None:
    error = OSError(number, "words of the library")
    assert shortage(error, is_bound=is_bound) == (os.strerror(number) if is_ours else "")
    outer = ConnectionError("no connection")
    outer.__cause__ = error
    assert bool(shortage(outer, is_bound=is_bound)) == is_ours
    assert lacks_descriptors(TimeoutError()) is False
