"""The engines that `engine_gpu.py` compares, each in its own process.

`ours` uses CUDA graphs and Triton kernels, `ours-eager` Triton kernels alone, `ours-sdpa` neither:
it gathers KV pages for torch's scaled_dot_product_attention and runs layers with torch's kernels.
`transformers` is `generate` with its default cache, `transformers-static` with a cache of fixed
size, for which it compiles the model.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.kernels.cuda import triton_kernels as kernels
from nodeagent.engine.loading import load_engine
from nodeagent.engine.weights.checkpoint import open_checkpoint
from ops.bench.engine_contestants import (
    BenchEngine,
    EmbeddedEngine,
    Prompts,
    TransformersEngine,
    serve,
)

_TOKENS_AT_ONCE: Final = 8192


class EmbeddedGpuEngine(EmbeddedEngine):
    """The embedded engine on a device."""

    def __init__(self, name: str, model: Path, device: str, sequences_max: int) -> None:
        if name == "ours-sdpa":
            kernels.DEVICE_TYPES.clear()
        source = open_checkpoint(model)
        self._shape = source.shape
        source.close()
        values = {
            "model_path": str(model),
            "served_name": "bench",
            "socket": "unused",
            "device": device,
            "threads": 1 if device == "cpu" else 8,
            "dtype": "fp32" if device == "cpu" else "bf16",
            "kv_memory_bytes": (1 << 24) if device == "cpu" else 16 << 30,
            "context_tokens_max": min(self._shape.context_tokens, 4096),
            "sequences_max": sequences_max,
            "batch_tokens_max": _TOKENS_AT_ONCE,
            "interval_ms": 60_000,
            # Outputs of random weights repeat themselves, which would favour speculation.
            "draft_tokens_max": 0,
            "graphs": name == "ours",
        }
        self._loaded = load_engine(msgspec.convert(values, EngineConfig))
        self._numbers = itertools.count(1)
        self._salt = b""

    def weights_bytes(self) -> int:
        return self._loaded.weights_bytes


class TransformersGpuEngine(TransformersEngine):
    """transformers on a device."""

    def __init__(self, model: Path, device: str, *, static: bool) -> None:
        from transformers import (  # type: ignore[import-not-found,unused-ignore]
            AutoModelForCausalLM,
        )

        loader: Any = AutoModelForCausalLM
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded = loader.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._torch = torch
        self._model = loaded.to(device).eval()
        self._cache = None
        self._device = device
        self._more: dict[str, Any] = {"cache_implementation": "static"} if static else {}

    def _generate(self, prompts: Prompts, tokens: int, **more: Any) -> float:
        torch.set_default_device(self._device)
        if "past_key_values" not in more:
            more |= self._more
        _settle(self._device)
        started_s = time.perf_counter()
        super()._generate(prompts, tokens, **more)
        _settle(self._device)
        return time.perf_counter() - started_s

    def prime(self, prefix: list[int]) -> None:
        torch.set_default_device(self._device)
        super().prime(prefix)


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_bytes(device: str) -> int:
    """Return the peak device memory of this process's tensors."""
    return 0 if device == "cpu" else int(torch.cuda.max_memory_allocated())


def build(name: str, model: Path, device: str, sequences_max: int) -> BenchEngine:
    """Return the engine called `name`."""
    if name.startswith("transformers"):
        return TransformersGpuEngine(model, device, static=name.endswith("static"))
    return EmbeddedGpuEngine(name, model, device, sequences_max)


def main() -> None:
    """Load, then serve calls until standard input ends."""
    name, model, device, sequences_max = sys.argv[1:5]
    serve(
        lambda: build(name, Path(model), device, int(sequences_max)),
        lambda: peak_bytes(device),
    )


if __name__ == "__main__":
    main()
