"""Opens the KV tiers that a configuration names."""

import asyncio
import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Final

import torch

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.kv.kv_store import STORE_BUFFER_BYTES
from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.kvcache.block_mover import STAGED_BYTES, BlockMover, DeviceBlocks
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.kvcache.mooncake_client import MooncakeClient
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.store_ports import listening_ports
from nodeagent.engine.kvcache.store_tier import StoreTier

KV_VERSION: Final = 1
"""Raised when a release computes or lays out KV otherwise than the one before for the same
settings. Engines of two versions exchange no blocks, and files of another version are not read."""

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 16 * 1024
_MODEL_FILES: Final = (".gguf", ".safetensors", ".json")


@dataclass(frozen=True)
class KvBlockForm:
    """The form of one KV block, and what identifies the model and the settings that made it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    model_path: Path
    settings: str

    @property
    def block_bytes(self) -> int:
        """The size of one block."""
        return prod(self.shape) * self.dtype.itemsize

    def fingerprint(self) -> bytes:
        """Return 16 bytes that only engines with interchangeable blocks share.

        The first call reads files. Later ones do not, because a file that is replaced does not
        change the weights that were loaded.
        """
        return self._fingerprint

    async def read_fingerprint(self) -> bytes:
        """Return the fingerprint; the call that reads files does so in a thread."""
        if "_fingerprint" not in vars(self):
            await asyncio.to_thread(self.fingerprint)
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> bytes:
        return model_fingerprint(self.model_path, self.settings)


def block_form(config: EngineConfig, shape: DecoderShape, kv_format: KvFormat) -> KvBlockForm:
    """Return the form of the blocks of an engine; of the whole model, however it is split."""
    return KvBlockForm(
        (shape.layers, BLOCK_TOKENS, 2 * shape.kv_heads, kv_format.width(shape.head_dim)),
        kv_format.dtype,
        Path(config.model_path),
        f"{shape} {config.dtype} {kv_format} {config.quantisation}",
    )


def open_tiers(
    config: EngineConfig, device: DeviceBlocks, shape: DecoderShape, kv_format: KvFormat
) -> BlockMover | None:
    """Return the mover between `device` and the tiers below it, or None without such tiers.

    Raises CheckpointError if the file tier lacks a folder or host memory, or cannot be opened.
    """
    form = block_form(config, shape, kv_format)
    block_bytes = form.block_bytes
    blocks = config.kv_host_bytes // block_bytes
    if config.kv_file_bytes and not (blocks and config.kv_folder):
        raise CheckpointError(
            f"cannot keep KV in files: kv_folder is needed, and kv_host_bytes for one block or more"
            f" ({block_bytes} bytes) to read them into"
        )
    if not blocks:
        return None
    host = HostTier(blocks, form.shape, form.dtype)
    files = None
    if config.kv_file_bytes:
        try:
            files = FileTier(
                Path(config.kv_folder), form.fingerprint(), block_bytes, config.kv_file_bytes
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot keep KV in {config.kv_folder}: {error.strerror or error}"
            ) from error
    staging = StagingMemory(max(STAGED_BYTES, block_bytes), config.device)
    return BlockMover(device, host, files, staging)


def open_store(config: EngineConfig, form: KvBlockForm) -> StoreTier | None:
    """Return the PoP's store of KV, which the engine has yet to join; None without one."""
    place, segment_bytes = config.kv_store, config.kv_store_bytes
    if place is None or not segment_bytes:
        return None
    return StoreTier(
        lambda: MooncakeClient(place, segment_bytes),
        form.fingerprint,
        form.block_bytes,
        # The other half is for the library, and for blocks between this buffer and the device.
        STORE_BUFFER_BYTES // 2,
        time.monotonic,
        lambda: listening_ports(place.first_port, place.last_port),
    )


def model_fingerprint(path: Path, settings: str) -> bytes:
    """Return 16 bytes that identify the model at `path` as loaded with `settings`.

    KV of one model is meaningless to another. The fingerprint hashes samples spread over each file,
    because reading a whole model would take as long as loading it. Weights that were trained
    further differ nearly everywhere, so that samples detect them.
    """
    # Version 1 was not named.
    version = f" KV version {KV_VERSION}" if KV_VERSION > 1 else ""
    digest = hashlib.sha256(f"{settings}{version}".encode())
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        if file.suffix not in _MODEL_FILES or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size};".encode())
        with file.open("rb") as opened:
            for number in range(_SAMPLES):
                opened.seek(size * number // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()[:16]
