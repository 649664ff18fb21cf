"""Which failed starts wait for memory of their device or for a descriptor, and until when."""

import pytest

from isochrone.wire.ids import DeviceId
from nodeagent.decide.replicas.start_lack import (
    DESCRIPTORS_RETRY_S,
    MEMORY_RETRY_S,
    descriptor_lack,
    may_start,
    memory_lack,
)

GIB = 1 << 30
GPUS = (DeviceId("gpu0"), DeviceId("gpu1"))
VLLM = (
    "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU"
    " memory utilization (0.2, 15.8 GiB)."
)
VLLM_ON_CPU = (
    "ValueError: Available memory on node 0 (1.0/62.0 GiB) on startup is less than desired"
)
EMBEDDED = "cannot load m on cpu: not enough memory, 9 bytes of weights and 9 of KV are needed"


@pytest.mark.parametrize(
    "problem",
    [
        "the engine exited while loading: torch.OutOfMemoryError: CUDA out of memory. Tried to",
        f"the engine exited while loading: {VLLM}",
        f"the engine exited while loading: {VLLM_ON_CPU}",
        f"the engine exited while loading: {EMBEDDED}",
        "the engine exited while loading: MemoryError",
        "the engine exited while loading: ggml_gallocr_reserve: failed to allocate CUDA0 buffer",
        "the engine exited while loading: RuntimeError: Not enough memory. Please try to increase",
        "the engine was killed by SIGKILL while loading, as the kernel does when memory is short",
        "[Errno 12] Cannot allocate memory",
    ],
)
def test_a_start_without_memory_waits_for_what_was_planned(problem: str) -> None:
    assert memory_lack(GPUS, free_bytes=8 * GIB, planned_bytes=16 * GIB, problem=problem)
    # With that much free it needs more than its plan, and would again.
    assert not memory_lack(GPUS, free_bytes=16 * GIB, planned_bytes=16 * GIB, problem=problem)


@pytest.mark.parametrize(
    "problem",
    [
        "vllm serve: error: unrecognized arguments: --new-option",
        "the engine was not ready after 600 s; if it only needs longer, raise load_timeout_s",
        "the node has 9 MiB of memory left, and this engine takes 99 MiB of 64 planned",
    ],
)
def test_another_failure_does_not_wait_for_memory(problem: str) -> None:
    assert memory_lack(GPUS, free_bytes=0, planned_bytes=16 * GIB, problem=problem) is None


@pytest.mark.parametrize(
    ("free_bytes", "waited_s", "expected"),
    [
        (16 * GIB, 0.0, True),
        (16 * GIB - 1, 0.0, False),
        (16 * GIB - 1, MEMORY_RETRY_S - 1, False),
        (0, MEMORY_RETRY_S, True),
    ],
)
def test_a_replica_starts_again_once_its_memory_is_free_or_after_a_while(
    free_bytes: int, waited_s: float, expected: bool
) -> None:
    lack = memory_lack(GPUS, 0, 16 * GIB, VLLM)
    assert lack is not None
    assert may_start(lack, free_bytes, waited_s) is expected


def test_free_memory_says_nothing_of_descriptors() -> None:
    lack = descriptor_lack("Too many open files")
    assert not may_start(lack, 99 * GIB, DESCRIPTORS_RETRY_S - 1)
    assert may_start(lack, 0, DESCRIPTORS_RETRY_S)


def test_operators_see_what_a_replica_waits_for() -> None:
    lack = memory_lack(GPUS, 3 * GIB, 16 * GIB, VLLM)
    assert lack is not None
    assert lack.reason.startswith(
        "waits for memory: gpu0, gpu1 has 3072 MiB free, and 16384 MiB are planned"
    )
    assert VLLM in lack.reason
