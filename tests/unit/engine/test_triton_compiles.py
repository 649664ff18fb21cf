"""The Triton kernels compile for an H200; Triton and its assembler need no device for that.

Run by `pytest tests/unit/engine/test_triton_compiles.py` where Triton is installed; takes a minute.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nodeagent.engine.kernels.cuda import triton_kernels as device
from nodeagent.engine.kernels.cuda.batch_layout import step_sizes, write_step
from nodeagent.engine.kernels.cuda.triton_kernels import TritonKernels
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.workers.commands import ChunkCommand, RunStep

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)

HEADS, KV_HEADS, DIM, BLOCKS = 32, 8, 128, 4
SHARED_BYTES_MAX = 227 * 1024
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
}
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class LaunchRecorder:
    """Replaces a module of kernels, and records the launches."""

    def __init__(self, module: Any, calls: list[Call]) -> None:
        self._module = module
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        kernel, calls = getattr(self._module, name), self._calls

        class Grid:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                assert all(size > 0 for size in grid)
                return lambda *given, **named: calls.append((kernel, given, named))

        return Grid()


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def kernels(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    monkeypatch.setattr(device, "_multiprocessors", lambda _: 132)
    found = TritonKernels()
    found._paged, found._rows = (
        LaunchRecorder(found._paged, calls),
        LaunchRecorder(found._rows, calls),
    )
    return found


def kind(given: Any) -> str:
    if isinstance(given, Tensor):
        return POINTERS[given.dtype]
    if isinstance(given, float):
        return "fp32"
    return "i32" if given < 1 << 31 else "i64"


def compile_all(calls: list[Call]) -> set[str]:
    """Compile the recorded launches; return the names of the kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = set()
    for kernel, given, named in calls:
        options = {
            "num_warps": named.pop("num_warps", 4),
            "enable_fp_fusion": named.pop("enable_fp_fusion"),
        }
        parameters = list(inspect.signature(kernel.fn).parameters)
        signature = dict(zip(parameters, map(kind, given), strict=False))
        signature |= dict.fromkeys(named, "constexpr")
        assert set(signature) == set(parameters)
        constants = {(parameters.index(name),): value for name, value in named.items()}
        source = ASTSource(kernel, {name: signature[name] for name in parameters}, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"] and made.metadata.shared <= SHARED_BYTES_MAX
        names.add(kernel.fn.__name__)
    return names


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.uint8),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_attention(
    kernels: TritonKernels, calls: list[Call], dtype: torch.dtype, kept: torch.dtype
) -> None:
    def told(start: int, tokens: int) -> ChunkCommand:
        return ChunkCommand(list(range(300)), start, tokens, [1] * tokens, (), True)

    form = KvFormat(kept)
    pages = torch.zeros(BLOCKS, 16, 2 * KV_HEADS, form.width(DIM), dtype=form.dtype)
    chunks = (told(0, 40),)
    # A single decode is split along its tokens, many decodes are not.
    for step in (RunStep((told(4000, 1),), chunks), RunStep((told(4000, 1),) * 64, chunks)):
        sizes = step_sizes(step, None)
        numbers = sizes.split(write_step(sizes, step, None, pinned=False))
        mixed = torch.zeros(sizes.rows, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
        kernels.store_kv(mixed, HEADS, numbers.slots, pages)
        kernels.attend(mixed, HEADS, pages, sizes.paged_batch(numbers, None))
    assert compile_all(calls) == {"store_heads", "attend_decodes", "merge_splits", "attend_chunks"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(kernels: TritonKernels, calls: list[Call], dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-5)
    kernels.add_rms_norm(x, x, weight, 1e-5)
    kernels.silu_gate(x)
    mixed = torch.zeros(3, 48, DIM, dtype=dtype)
    cos = torch.zeros(3, 1, DIM, dtype=dtype)
    kernels.rotate_(mixed, HEADS + KV_HEADS, cos, cos)
    assert compile_all(calls) == {"rms_norm_rows", "silu_gate_rows", "rotate_heads"}
