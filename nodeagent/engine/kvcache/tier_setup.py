"""Making the tiers that a configuration asks for, and knowing whose files can be used again."""

import hashlib
from pathlib import Path
from typing import Final

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.kvcache.block_mover import Device, Mover
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.model.layers.kv_format import KvFormat
from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 16 * 1024
_MODEL_FILES: Final = (".gguf", ".safetensors", ".json")


def open_tiers(
    config: EngineConfig, device: Device, shape: ModelShape, form: KvFormat
) -> Mover | None:
    """Return what lies below the device, or None where nothing was asked for."""
    block_bytes = form.bytes_per_token(shape) * BLOCK_TOKENS
    blocks = config.kv_host_bytes // block_bytes
    if config.kv_file_bytes and not (blocks and config.kv_folder):
        raise CheckpointError(
            f"cannot keep KV in files: kv_folder is needed, and kv_host_bytes for one block or more"
            f" ({block_bytes} bytes) to read them into"
        )
    if not blocks:
        return None
    host = HostTier(
        blocks,
        (shape.layers, BLOCK_TOKENS, 2 * shape.kv_heads, form.width(shape.head_dim)),
        form.dtype,
    )
    files = None
    if config.kv_file_bytes:
        model = identity(
            Path(config.model_path), f"{shape} {config.dtype} {form} {config.quantisation}"
        )
        try:
            files = FileTier(Path(config.kv_folder), model, block_bytes, config.kv_file_bytes)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep KV in {config.kv_folder}: {error.strerror or error}"
            ) from error
    return Mover(device, host, files)


def identity(path: Path, how: str) -> bytes:
    """Tell models apart by samples of their files: KV of one is nonsense to another.

    Reading all of a model would take as long as loading it. Weights that were trained further
    differ nearly everywhere, so samples spread over each file find them out.
    """
    digest = hashlib.sha256(how.encode())
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
