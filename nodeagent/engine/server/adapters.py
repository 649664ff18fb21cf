"""The LoRA adapters that requests may name: known by their folder, cached in memory.

Rule 1: at most `adapters_max` adapters and `adapter_memory_bytes` bytes are cached. Beyond that the
least recently used is dropped, and read again when a request names it.
Rule 2: dropping or unloading an adapter does not affect requests that run with it: each holds a
reference until it ends.
Rule 3: files are read off the event loop, one adapter at a time.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta

from isochrone.service.threads import run_to_completion
from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import END
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.server.openai.request_body import decode_body
from nodeagent.engine.server.openai.request_errors import invalid_request, model_not_found
from nodeagent.engine.weights.adapter_folder import read_adapter
from nodeagent.engine.weights.lora_adapter import LoraAdapter

KNOWN_MAX: Final = 4096
"""Adapters known by name, whether cached or not."""

AdapterName = Annotated[str, Meta(pattern=rf"^@?[A-Za-z0-9][A-Za-z0-9._/@:-]{{0,254}}{END}")]


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: AdapterName


load_decoder: Final = msgspec.json.Decoder(LoadAdapterBody)
unload_decoder: Final = msgspec.json.Decoder(UnloadAdapterBody)


@dataclass(slots=True)
class AdapterRegistry:
    """The adapters of one model. Everything but the reading of files runs on the event loop."""

    config: EngineConfig
    active_adapters: ActiveAdapters
    """Describes the modules of the model that adapters may change."""
    dtype: torch.dtype
    reads_total: int = 0
    _folders: dict[str, Path] = field(default_factory=dict)
    _cache: OrderedDict[str, LoraAdapter] = field(default_factory=OrderedDict)
    _read_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def names(self) -> list[str]:
        """All adapter names that a request may use, cached or not."""
        return sorted(self._folders)

    @property
    def cached(self) -> int:
        """The number of adapters in memory."""
        return len(self._cache)

    async def load(self, body: bytes) -> str:
        """Read an adapter and make it known by its name; return the name. Raises ApiError."""
        request: LoadAdapterBody = decode_body(body, load_decoder, self.config.body_bytes_max)
        name, folder = request.lora_name, Path(request.lora_path)
        if name == self.config.served_name:
            raise invalid_request(
                "lora_name", f"cannot load an adapter as {name!r}: this is the model's own name"
            )
        if name not in self._folders and len(self._folders) >= KNOWN_MAX:
            raise invalid_request(
                "lora_name", f"cannot load more than {KNOWN_MAX} adapters: unload one first"
            )
        async with self._read_lock:
            adapter = await self._read(name, folder)
            self._folders[name] = folder
            self._add_to_cache(adapter)
        return name

    def unload(self, body: bytes) -> str:
        """Forget an adapter and return its name; requests that run with it continue."""
        request: UnloadAdapterBody = decode_body(body, unload_decoder, self.config.body_bytes_max)
        name = request.lora_name
        if self._folders.pop(name, None) is None:
            raise self._not_found(name)
        self._cache.pop(name, None)
        return name

    async def get(self, name: str | None) -> LoraAdapter | None:
        """Return the adapter that a request's `model` names; None if it names the model itself."""
        if name is None or name == self.config.served_name:
            return None
        if name not in self._folders:
            raise self._not_found(name)
        adapter = self._cache.get(name)
        if adapter is None:
            async with self._read_lock:
                # While this request waited, another may have read the adapter or unloaded it.
                adapter = self._cache.get(name)
                if adapter is None and name in self._folders:
                    adapter = await self._read(name, self._folders[name])
                if adapter is None or name not in self._folders:
                    raise self._not_found(name)
                self._add_to_cache(adapter)
        self._cache.move_to_end(name)
        return adapter

    async def _read(self, name: str, folder: Path) -> LoraAdapter:
        self.reads_total += 1
        config = self.config
        is_split = config.tensor_parallel * config.pipeline_parallel > 1
        try:
            return await run_to_completion(
                read_adapter,
                name,
                folder,
                self.active_adapters.modules,
                # For a split model this copy only supplies each rank with its part.
                "cpu" if is_split else config.device,
                self.dtype,
                config.adapter_memory_bytes,
            )
        except CheckpointError as error:
            raise invalid_request("lora_path", str(error)) from error

    def _add_to_cache(self, adapter: LoraAdapter) -> None:
        self._cache[adapter.name] = adapter
        self._cache.move_to_end(adapter.name)
        config = self.config
        while (
            len(self._cache) > config.adapters_max
            or sum(cached.size_bytes for cached in self._cache.values())
            > config.adapter_memory_bytes
        ):
            self._cache.popitem(last=False)

    def _not_found(self, name: str) -> ApiError:
        adapters = f" and {len(self._folders)} adapters" if self._folders else ""
        return model_not_found(name, f"{self.config.served_name!r}{adapters}")
