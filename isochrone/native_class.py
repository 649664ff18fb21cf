"""How the compiler of the request path lays out a class; without it the decorator does nothing.

`acyclic=True` leaves out the support for the garbage collector: no object of the class may be
reachable from itself. `free_list_len=1` keeps the memory of one freed object for the next.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_settings: Any) -> Callable[[type], type]:
        """Return the class as it is."""
        return lambda native_class: native_class
