"""The client of Mooncake Store, from the package `mooncake-transfer-engine`.

The package is imported when an engine joins a store, so that engines without one do not need it.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from isochrone.wire.engines.engine import KvStorePlace
from isochrone.wire.kv.kv_store import STORE_COPIES
from nodeagent.engine.kvcache.store_tier import StoreLost

LOCAL_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""Memory that the library allocates for calls that are not made here."""


class MooncakeClient:
    """A member of the store that gives `segment_bytes` of memory to it."""

    def __init__(self, place: KvStorePlace, segment_bytes: int) -> None:
        """Join. Raises StoreLost if the library is missing or the master cannot be reached."""
        for name in ("MC_MIN_RPC_PORT", "MC_STORE_CLIENT_MIN_PORT"):
            os.environ[name] = str(place.first_port)
            os.environ[name.replace("MIN", "MAX")] = str(place.last_port)
        try:
            # The library reads these variables when it is loaded.
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise StoreLost(f"Mooncake cannot be imported: {error}") from error
        self._store: Any = MooncakeDistributedStore()
        self._copies: Any = ReplicateConfig()
        # Fewer where fewer engines live.
        self._copies.replica_num = STORE_COPIES
        code = self._store.setup(
            place.host,
            "P2PHANDSHAKE",
            segment_bytes,
            LOCAL_BUFFER_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{place.master_port}",
        )
        if code:
            raise StoreLost(f"Mooncake's setup failed with {code}")

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist. Raises StoreLost."""
        found = self._store.batch_is_exist(list(names))
        if any(code < 0 for code in found):
            raise StoreLost("the master did not answer")
        return [code == 1 for code in found]

    def get(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        """Copy objects to `places`; say which came whole."""
        pointers, sizes = _memory(places)
        codes = self._store.batch_get_into(list(names), pointers, sizes)
        return [code == size for code, size in zip(codes, sizes, strict=True)]

    def put(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        """Store objects, as far as there is memory; say which are stored."""
        pointers, sizes = _memory(places)
        codes = self._store.batch_put_from(list(names), pointers, sizes, self._copies)
        return [code == 0 for code in codes]

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        self._store.remove(name, True)

    def register(self, buffer: Tensor) -> None:
        """Prepare memory that all `places` lie in. Raises StoreLost."""
        if code := self._store.register_buffer(buffer.data_ptr(), buffer.nbytes):
            raise StoreLost(f"Mooncake cannot register memory: {code}")

    def close(self) -> None:
        """Leave the store, and take the memory that was given to it back."""
        self._store.close()


def _memory(places: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [place.data_ptr() for place in places], [place.nbytes for place in places]
