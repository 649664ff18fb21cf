"""The adapters that requests may name: known by their folder, in memory as far as there is room.

Rule 1: at most `adapters_max` adapters and `adapter_memory_bytes` bytes stay; past that the least
recently used is dropped, and read again when it is next asked for.
Rule 2: dropping and unloading disturb nobody: who runs with an adapter holds it until it ends.
Rule 3: a file is read off the event loop, one at a time.
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
from isochrone.wire.engine import EngineConfig
from isochrone.wire.errors import ApiError
from nodeagent.engine.model.layers.lora import Adapter, Adding
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.server.request_body import decoded, refused, unknown_model
from nodeagent.engine.weights.adapter import read_adapter

KNOWN_MAX: Final = 4096

AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@:-]{0,127}$")]


class LoadBody(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadBody(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: AdapterName


load_decoder: Final = msgspec.json.Decoder(LoadBody)
unload_decoder: Final = msgspec.json.Decoder(UnloadBody)


@dataclass(slots=True)
class Adapters:
    """The adapters of one model. All of it runs on the event loop but the reading of files."""

    config: EngineConfig
    adding: Adding
    dtype: torch.dtype
    reads_total: int = 0
    _folders: dict[str, Path] = field(default_factory=dict)
    _kept: OrderedDict[str, Adapter] = field(default_factory=OrderedDict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def names(self) -> list[str]:
        """All that a request may name, in memory or not."""
        return sorted(self._folders)

    @property
    def kept(self) -> int:
        """How many are in memory."""
        return len(self._kept)

    async def load(self, body: bytes) -> str:
        """Make an adapter known by a name, having read it; return the name."""
        asked: LoadBody = decoded(body, load_decoder, self.config.body_bytes_max)
        name, folder = asked.lora_name, Path(asked.lora_path)
        if name == self.config.served_name:
            raise refused("lora_name", f"cannot load an adapter as {name!r}: the model has it")
        if name not in self._folders and len(self._folders) >= KNOWN_MAX:
            raise refused("lora_name", f"cannot know more than {KNOWN_MAX} adapters: unload one")
        async with self._reading:
            adapter = await self._read(name, folder)
            self._folders[name] = folder
            self._keep(adapter)
        return name

    def unload(self, body: bytes) -> str:
        """Forget an adapter; requests that run with it go on. Return its name."""
        asked: UnloadBody = decoded(body, unload_decoder, self.config.body_bytes_max)
        name = asked.lora_name
        if self._folders.pop(name, None) is None:
            raise self._unknown(name)
        self._kept.pop(name, None)
        return name

    async def hold(self, name: str | None) -> Adapter | None:
        """Return the adapter that a request's `model` names; None where it names the model."""
        if name is None or name == self.config.served_name:
            return None
        if name not in self._folders:
            raise self._unknown(name)
        adapter = self._kept.get(name)
        if adapter is None:
            async with self._reading:
                # Whoever waited here before may have read it meanwhile, or it was unloaded.
                adapter = self._kept.get(name)
                if adapter is None and name in self._folders:
                    adapter = await self._read(name, self._folders[name])
                if adapter is None or name not in self._folders:
                    raise self._unknown(name)
                self._keep(adapter)
        self._kept.move_to_end(name)
        return adapter

    async def _read(self, name: str, folder: Path) -> Adapter:
        self.reads_total += 1
        config = self.config
        split = config.tensor_parallel * config.pipeline_parallel > 1
        try:
            return await run_to_completion(
                read_adapter,
                name,
                folder,
                self.adding.modules,
                # Of a split model's, each rank is given its part: this one is only read from.
                "cpu" if split else config.device,
                self.dtype,
                config.adapter_memory_bytes,
            )
        except CheckpointError as error:
            raise refused("lora_path", str(error)) from error

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.name] = adapter
        self._kept.move_to_end(adapter.name)
        config = self.config
        while (
            len(self._kept) > config.adapters_max
            or sum(one.size_bytes for one in self._kept.values()) > config.adapter_memory_bytes
        ):
            self._kept.popitem(last=False)

    def _unknown(self, name: str) -> ApiError:
        others = f" and {len(self._folders)} adapters" if self._folders else ""
        return unknown_model(name, f"{self.config.served_name!r}{others}")
