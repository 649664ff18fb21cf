"""Memory of a part is used again once no view of it is left, and never before."""

import threading

import numpy as np
import torch

from nodeagent.engine.kvcache.staging_memory import BUFFERS_KEPT_MAX, StagingMemory


def address(part: np.ndarray) -> int:
    return int(part.ctypes.data)


def test_a_part_is_used_again_when_its_last_view_is_gone() -> None:
    staging = StagingMemory(64)
    part = staging.take(40)
    assert part.nbytes == 40
    at = address(part)
    views = [
        part.data[8:16],
        torch.from_numpy(part).view(torch.bfloat16)[4:],
        part[10:20],
        torch.frombuffer(part.data[:8], dtype=torch.uint8),
        memoryview(torch.from_numpy(part[8:]).view(2, 16)[1].numpy().reshape(-1).data),
    ]
    del part
    while views:
        assert len(staging._free) == 0, f"{len(views)} views are left"
        assert address(staging.take(64)) != at
        # The one that was just taken and let go of is free; it is not the one in use.
        assert len(staging._free) == 1
        staging._free.clear()
        views.pop()
    assert address(staging.take(64)) == at


def test_the_number_of_kept_buffers_is_bounded() -> None:
    staging = StagingMemory(64)
    parts = [staging.take(1) for _ in range(BUFFERS_KEPT_MAX + 3)]
    assert len({address(part) for part in parts}) == len(parts)
    parts.clear()
    assert len(staging._free) == BUFFERS_KEPT_MAX
    staging.forget()
    assert len(staging._free) == 0


def test_more_than_a_buffer_has_comes_from_the_allocator() -> None:
    staging = StagingMemory(64)
    assert staging.take(65).nbytes == 65
    assert len(staging._free) == 0


def test_threads_never_get_the_same_memory() -> None:
    staging, wrong = StagingMemory(4096), []

    def work(number: int) -> None:
        for _ in range(300):
            part = staging.take(4096)
            part[:] = number
            if not (part == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
