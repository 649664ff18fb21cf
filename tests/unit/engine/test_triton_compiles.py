"""What the launchers start compiles for an H200: Triton and its assembler need no device for that.

Run by `pytest tests/unit/engine/test_triton_compiles.py` where Triton is installed; takes a minute.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nodeagent.engine.distributed.commands import Run, Told
from nodeagent.engine.kernels.cuda import kernels as device
from nodeagent.engine.kernels.cuda.batch_layout import host_numbers, sizes_of
from nodeagent.engine.kernels.cuda.kernels import DeviceKernels
from nodeagent.engine.model.layers.kv_format import KvFormat

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted is not compiled"
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


class Recorded:
    """Stands for a module of kernels: notes what would be started."""

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
def kernels(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> DeviceKernels:
    monkeypatch.setattr(device, "_processors", lambda _: 132)
    found = DeviceKernels()
    found._paged, found._rows = Recorded(found._paged, calls), Recorded(found._rows, calls)
    return found


def kind(given: Any) -> str:
    if isinstance(given, Tensor):
        return POINTERS[given.dtype]
    if isinstance(given, float):
        return "fp32"
    return "i32" if given < 1 << 31 else "i64"


def compile_all(calls: list[Call]) -> set[str]:
    """Compile what was recorded; return which kernels those were."""
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
    kernels: DeviceKernels, calls: list[Call], dtype: torch.dtype, kept: torch.dtype
) -> None:
    def told(start: int, tokens: int) -> Told:
        return Told(list(range(300)), start, tokens, [1] * tokens, (), True)

    form = KvFormat(kept)
    pages = torch.zeros(BLOCKS, 16, 2 * KV_HEADS, form.width(DIM), dtype=form.dtype)
    chunks = (told(0, 40),)
    # One row is split along its tokens; of many none is.
    for step in (Run((told(4000, 1),), chunks), Run((told(4000, 1),) * 64, chunks)):
        sizes = sizes_of(step, None)
        numbers = sizes.split(host_numbers(sizes, step, None, pinned=False))
        mixed = torch.zeros(sizes.rows, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
        kernels.keep(mixed, HEADS, numbers.slots, pages)
        kernels.attend(mixed, HEADS, pages, sizes.layout(numbers, None))
    assert compile_all(calls) == {"keep_heads", "attend_decodes", "merge_parts", "attend_chunks"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(kernels: DeviceKernels, calls: list[Call], dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    kernels.normalise(x, weight, 1e-5)
    kernels.add_and_normalise(x, x, weight, 1e-5)
    kernels.gate(x)
    mixed = torch.zeros(3, 48, DIM, dtype=dtype)
    cos = torch.zeros(3, 1, DIM, dtype=dtype)
    kernels.turn(mixed, HEADS + KV_HEADS, cos, cos)
    assert compile_all(calls) == {"normalise_rows", "gate_rows", "turn_heads"}
