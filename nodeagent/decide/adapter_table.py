"""The LoRA adapters that one engine has loaded: which are in use, and which to unload.

Rule 1: an adapter that a request uses is never unloaded.
Rule 2: beyond a limit the least recently used adapter is unloaded. Its files may then be deleted.
Rule 3: an adapter that the engine has refused is not loaded again: an attempt stops vLLM's other
requests.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

REFUSALS_MAX: Final = 256
"""How many refused adapters are remembered, the newest."""


@dataclass(slots=True)
class _Loaded:
    """One adapter: the digest of its files, and how many requests use it."""

    digest: str
    users: int = 0


class AdapterTable:
    """The adapters of one engine, least recently used first."""

    def __init__(self, loaded_max: int) -> None:
        """Hold at most `loaded_max`, or as many as are in use."""
        self._loaded_max = loaded_max
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._refusals: dict[str, str] = {}
        """The engine's reason for refusing an adapter, by digest, the oldest first."""

    @property
    def names(self) -> Collection[str]:
        """The ids of all loaded adapters, the least recently used first."""
        return self._loaded.keys()

    @property
    def digests(self) -> Collection[str]:
        """The digests of the files that the engine may read again."""
        return {loaded.digest for loaded in self._loaded.values()}

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._loaded

    def add(self, adapter_id: str, digest: str) -> None:
        """Note that an adapter was loaded."""
        self._loaded[adapter_id] = _Loaded(digest)

    def begin_use(self, adapter_id: str) -> None:
        """Note that a request uses a loaded adapter."""
        self._loaded[adapter_id].users += 1
        self._loaded.move_to_end(adapter_id)

    def end_use(self, adapter_id: str) -> None:
        """Note that a request no longer uses an adapter; the engine may have been replaced."""
        loaded = self._loaded.get(adapter_id)
        if loaded is not None and loaded.users:
            loaded.users -= 1

    def take_surplus(self) -> list[str]:
        """Remove idle adapters beyond the limit; return their ids."""
        surplus = []
        for adapter_id, loaded in list(self._loaded.items()):
            if len(self._loaded) <= self._loaded_max:
                break
            if not loaded.users:
                del self._loaded[adapter_id]
                surplus.append(adapter_id)
        return surplus

    def clear(self) -> None:
        """Forget all: the engine was replaced, and the new one has loaded none."""
        self._loaded.clear()
        self._refusals.clear()

    def refuse(self, digest: str, reason: str) -> None:
        """Note that the engine refuses an adapter with these files."""
        if len(self._refusals) >= REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[digest] = reason

    def refusal(self, digest: str) -> str:
        """Return why the engine has refused an adapter, "" if it has not."""
        return self._refusals.get(digest, "")
