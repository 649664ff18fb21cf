"""A step on a fake device: every tensor is on the device, and nothing waits for its numbers.

Torch's fake tensors have a device and a shape but no numbers. An operation that mixes devices
raises, and so does one that reads a number from the device, which would stall a real step.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels import selection
from nodeagent.engine.kernels.cuda import attention as cuda_attention
from nodeagent.engine.kernels.cuda import triton_kernels as kernels
from nodeagent.engine.kernels.cuda.batch_layout import PagedBatch, StepSizes
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.qwen2 import Qwen2
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.workers.commands import ChunkCommand, RunStep
from tests.unit.engine.tiny import SHAPE, RandomWeights

DEVICE = "fake:0"


class DeviceCheck:
    """Attention kernels that only check that their arguments are on the device."""

    def store_kv(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        assert {str(one.device) for one in (mixed, slots, pages)} == {DEVICE}

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, batch: PagedBatch) -> Tensor:
        assert batch.decodes is not None and batch.chunks is not None
        read = (batch.decodes.tables, batch.decodes.spans, batch.chunks.tables)
        assert {str(one.device) for one in (*read, batch.chunks.places)} == {DEVICE}
        return mixed.new_empty(mixed.shape[0], heads, mixed.shape[2])


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeTensorMode]:
    _setup_privateuseone_for_python_backend("fake")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def no_numbers(sizes: StepSizes, step: RunStep, window: int | None, pinned: bool) -> Tensor:
    """Replace `write_step`: a fake host tensor has no memory to write to."""
    return torch.empty(sizes.total(), dtype=torch.int64)


def step() -> RunStep:
    def told(start: int, tokens: int, blocks: list[int], *drafts: int) -> ChunkCommand:
        return ChunkCommand(blocks, start, tokens + len(drafts), [1] * tokens, drafts, True)

    decodes = (told(40, 1, [5, 1, 8]), told(3, 1, [2]))
    return RunStep(decodes, (told(0, 9, [3]), told(20, 30, [9, 4, 6, 7])))


@pytest.mark.parametrize("over_pages", [False, True], ids=["gathered", "paged"])
@pytest.mark.parametrize("family", [Llama, Qwen2, Qwen3])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.uint8)],
    ids=["bf16", "fp8"],
)
def test_a_step_stays_on_the_device(
    fake: FakeTensorMode,
    monkeypatch: pytest.MonkeyPatch,
    family: type[Llama],
    over_pages: bool,
    dtype: torch.dtype,
    kept: torch.dtype,
) -> None:
    kernels = DeviceCheck() if over_pages else None
    monkeypatch.setattr(selection, "paged_kernels", lambda device, kv_dtype: kernels)
    monkeypatch.setattr(cuda_attention, "write_step", no_numbers)
    shape = replace(SHAPE, window_tokens=24)
    model = family(shape, RandomWeights(1), DEVICE, dtype, shape.context_tokens)
    engine = ModelRunner(model, 12, DEVICE, dtype, KvFormat(kept))
    logits = engine.run(step())
    assert logits.shape == (4, shape.vocabulary)
    assert (str(logits.device), logits.dtype) == (DEVICE, torch.float32)
    engine.clear([1, 2])
    contents = engine.read_blocks([1, 2])
    assert contents.device.type == "cpu"
    engine.write_blocks([3, 4], contents)


def test_an_adapter_stays_on_the_device(fake: FakeTensorMode) -> None:
    model = Llama(SHAPE, RandomWeights(1), DEVICE, torch.bfloat16, SHAPE.context_tokens)
    engine = ModelRunner(model, 12, DEVICE, torch.bfloat16)
    module, (rows, columns) = next(iter(engine.active_adapters.modules.items()))
    pair = [
        torch.empty(*sizes, device=DEVICE, dtype=torch.bfloat16)
        for sizes in ((2, columns), (rows, 2))
    ]

    class Decode:
        blocks, adapter = [0], LoraAdapter("a", {module: (pair[0], pair[1])}, b"", 0)
        start, tokens, ids, drafts, samples = 3, 1, [5], (), True

    class Step:
        decodes = chunks = (Decode(), Decode())
        segments = ()

    assert str(engine.run(Step()).device) == DEVICE


def test_without_working_triton_kernels_torch_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A TritonError is no RuntimeError; kernels start on the selected device."""

    class TritonError(Exception):
        pass

    class BrokenKernels:
        def silu_gate(self, x: Tensor) -> Tensor:
            assert selected == ["cpu"]
            raise TritonError("ptxas knows no such processor")

    selected: list[str] = []
    triton = ModuleType("triton")
    monkeypatch.setattr(triton, "TritonError", TritonError, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(kernels, "TritonKernels", BrokenKernels)
    monkeypatch.setattr(kernels, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(kernels, "select_device", selected.append)
    kernels._tested_kernels.cache_clear()
    assert kernels.triton_kernels(torch.device("cpu")) is None
    kernels._tested_kernels.cache_clear()
