"""The layers that this process has computed. A long step moves the count, and a hang does not.

One thread computes, and any thread may read. On a GPU a layer counts when it was handed over.
"""

from ctypes import addressof, c_int64
from typing import Final

_COUNT: Final = c_int64(0)

ADDRESS: Final = addressof(_COUNT)
"""Where C code that runs many layers counts them."""


def count_layer() -> None:
    """Count one layer."""
    _COUNT.value += 1


def layers_computed() -> int:
    """Return the count."""
    return _COUNT.value
