"""A step on a device that only pretends: every tensor is where it belongs, and nobody waits for it.

Torch's fake tensors have a device and a shape but no numbers. What mixes devices raises, and so
does whatever asks the device for a number, which on a real one would hold up the step.
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

from nodeagent.engine.core import model_runner as runner
from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.commands import Run, Told
from nodeagent.engine.kernels.cuda import kernels
from nodeagent.engine.kernels.cuda.batch_layout import Paged, Sizes
from nodeagent.engine.model.layers import attention
from nodeagent.engine.model.layers.kv_format import KvFormat
from nodeagent.engine.model.layers.lora import Adapter
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.qwen2 import Qwen2
from nodeagent.engine.model.qwen3 import Qwen3
from tests.unit.engine.tiny import SHAPE, RandomWeights

DEVICE = "pretended:0"


class Nothing:
    """The device's kernels without their numbers: they hold that all they get is on the device."""

    def keep(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        assert {str(one.device) for one in (mixed, slots, pages)} == {DEVICE}

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: Paged) -> Tensor:
        assert layout.decodes is not None and layout.chunks is not None
        read = (layout.decodes.tables, layout.decodes.spans, layout.chunks.tables)
        assert {str(one.device) for one in (*read, layout.chunks.places)} == {DEVICE}
        return mixed.new_empty(mixed.shape[0], heads, mixed.shape[2])


@pytest.fixture(scope="module")
def pretended() -> Iterator[FakeTensorMode]:
    _setup_privateuseone_for_python_backend("pretended")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def no_numbers(sizes: Sizes, step: Run, window: int | None, pinned: bool) -> Tensor:
    """Stand for what is written on the host, where a fake tensor has no place to write to."""
    return torch.empty(sizes.total(), dtype=torch.int64)


def step() -> Run:
    def told(start: int, tokens: int, blocks: list[int], *drafts: int) -> Told:
        return Told(blocks, start, tokens + len(drafts), [1] * tokens, drafts, True)

    decodes = (told(40, 1, [5, 1, 8]), told(3, 1, [2]))
    return Run(decodes, (told(0, 9, [3]), told(20, 30, [9, 4, 6, 7])))


@pytest.mark.parametrize("over_pages", [False, True], ids=["gathered", "paged"])
@pytest.mark.parametrize("family", [Llama, Qwen2, Qwen3])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.uint8)],
    ids=["bf16", "fp8"],
)
def test_a_step_stays_on_the_device(
    pretended: FakeTensorMode,
    monkeypatch: pytest.MonkeyPatch,
    family: type[Llama],
    over_pages: bool,
    dtype: torch.dtype,
    kept: torch.dtype,
) -> None:
    kernels = Nothing() if over_pages else None
    monkeypatch.setattr(attention, "page_kernels", lambda pages: kernels)
    monkeypatch.setattr(runner, "host_numbers", no_numbers)
    shape = replace(SHAPE, window_tokens=24)
    model = family(shape, RandomWeights(1), DEVICE, dtype, shape.context_tokens)
    engine = Runner(model, 12, DEVICE, dtype, KvFormat(kept))
    logits = engine.run(step())
    assert logits.shape == (4, shape.vocabulary)
    assert (str(logits.device), logits.dtype) == (DEVICE, torch.float32)
    engine.clear([1, 2])
    contents = engine.read_blocks([1, 2])
    assert contents.device.type == "cpu"
    engine.write_blocks([3, 4], contents)


def test_an_adapter_stays_on_the_device(pretended: FakeTensorMode) -> None:
    model = Llama(SHAPE, RandomWeights(1), DEVICE, torch.bfloat16, SHAPE.context_tokens)
    engine = Runner(model, 12, DEVICE, torch.bfloat16)
    module, (rows, columns) = next(iter(engine.adding.modules.items()))
    pair = [
        torch.empty(*sizes, device=DEVICE, dtype=torch.bfloat16)
        for sizes in ((2, columns), (rows, 2))
    ]

    class Decode:
        blocks, adapter = [0], Adapter("a", {module: (pair[0], pair[1])}, b"", 0)
        start, tokens, ids, drafts, samples = 3, 1, [5], (), True

    class Step:
        decodes = chunks = (Decode(), Decode())
        segments = ()

    assert str(engine.run(Step()).device) == DEVICE


def test_a_device_whose_kernels_cannot_be_built_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's errors are of a kind of their own, and it starts kernels on the thread's device."""

    class TritonError(Exception):
        pass

    class Unbuilt:
        def gate(self, x: Tensor) -> Tensor:
            assert entered == ["cpu"]
            raise TritonError("ptxas knows no such processor")

    entered: list[str] = []
    triton = ModuleType("triton")
    monkeypatch.setattr(triton, "TritonError", TritonError, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(kernels, "DeviceKernels", Unbuilt)
    monkeypatch.setattr(kernels, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(kernels, "enter", entered.append)
    kernels._found.cache_clear()
    assert kernels.device_kernels(torch.empty(1)) is None
    kernels._found.cache_clear()
