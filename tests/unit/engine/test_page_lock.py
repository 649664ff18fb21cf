"""Memory that a GPU copies from and to is page-locked, and used unlocked where that is refused."""

import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isochrone.service.windows.shared_window import OwnedWindow
from isochrone.service.windows.window_pool import WINDOWS_MAX
from nodeagent.engine.kvcache import page_lock
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.page_lock import host_memory, lock_pages
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.server.kv.kv_windows import KvWindows

GPU = "cuda:1"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class FakeCuda:
    """Stands in for the calls of CUDA's runtime."""

    class cudaError:
        success = 0

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.devices: list[str] = []
        self.pinned: list[int] = []
        self.answer = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 0 and self.devices[-1] == GPU
        if not self.answer:
            self.locked[address] = size_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert self.devices[-1] == GPU
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    @contextmanager
    def device(self, device: str) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.append("")

    def empty(self, size_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        if self.answer:
            raise RuntimeError(f"CUDA error {self.answer}")
        self.pinned.append(size_bytes)
        return torch.zeros(size_bytes, dtype=dtype)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch, "empty", fake.empty)
    page_lock._warn.cache_clear()
    return fake


def test_staging_memory_of_a_gpu_is_locked_and_used_again(cuda: FakeCuda) -> None:
    staging = StagingMemory(64, GPU)
    for _ in range(3):
        assert staging.take(40).nbytes == 40
    assert cuda.pinned == [64]
    StagingMemory(64).take(40)
    assert cuda.pinned == [64], "a CPU needs none"


async def test_a_window_of_a_gpu_is_locked_until_it_is_closed(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    form = KvBlockForm((1, 16, 2, 8), torch.uint8, tmp_path, "")
    windows = KvWindows(form, tmp_path / "w.sock", StagingMemory(0), GPU)
    await windows.start()
    try:
        for _ in range(2):
            async with windows.lease(secrets.token_hex(16)) as lease:
                assert lease is not None
                assert list(cuda.locked.values()) == [len(lease.window.memory)]
                address = torch.frombuffer(lease.window.memory, dtype=torch.uint8).data_ptr()
                assert list(cuda.locked) == [address]
    finally:
        await windows.close()
    assert not cuda.locked
    assert len(cuda.devices) <= 4 * WINDOWS_MAX


def test_without_a_gpu_nothing_is_locked(cuda: FakeCuda) -> None:
    window = OwnedWindow(1 << 16, lock=lambda memory: lock_pages(memory, "cpu"))
    window.close()
    assert host_memory(64, "cpu").nbytes == 64
    assert not (cuda.locked or cuda.devices or cuda.pinned)


@pytest.mark.parametrize(
    ("limit", "named"), [(8 << 20, "8388608 bytes"), (resource.RLIM_INFINITY, "no limit")]
)
def test_memory_that_cannot_be_locked_is_used_and_the_limit_named(
    cuda: FakeCuda,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    named: str,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    cuda.answer = 2
    for _ in range(2):
        unlock = lock_pages(mmap(-1, 1 << 16), GPU)
        unlock()
        assert host_memory(64, GPU).nbytes == 64
    assert not cuda.locked
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.split(";")[0] for text in warnings] == [
        "cannot lock host memory for copies of the GPU: error 2",
        "cannot lock host memory for copies of the GPU: CUDA error 2",
    ]
    assert all(f"lock {named} (memlock" in text for text in warnings)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_copies_from_and_to_locked_memory() -> None:
    device, size_bytes = "cuda:0", 1 << 20
    sent = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    staged = torch.from_numpy(StagingMemory(2 * size_bytes, device).take(size_bytes))
    window = OwnedWindow(size_bytes, lock=lambda memory: lock_pages(memory, device))
    shared = torch.frombuffer(window.memory, dtype=torch.uint8)
    for memory in (staged, shared):
        assert memory.is_pinned()
        memory.copy_(sent.to(device))
        assert torch.equal(memory, sent)
        assert torch.equal(memory.to(device).cpu(), sent)
    window.close()
    assert not shared.is_pinned()
    assert torch.equal(shared, sent)
    host = HostTier(2, (size_bytes // 2,), torch.uint8)
    host.put([b"a", b"b"], sent.view(2, -1))
    taken = host.get([b"b", b"a"], host.shaped(StagingMemory(size_bytes, device).take(size_bytes)))
    assert taken.is_pinned()
    assert torch.equal(taken.to(device).cpu(), sent.view(2, -1).flip(0))
