"""The threads that share the work of a kernel's call (thread_team.c)."""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch

from nodeagent.engine.kernels.cpu.build import OPTIONS, SOURCES, compilers

LIMIT_S: Final = 60.0
"""Of a call that would never end. It takes microseconds."""
THREADS: Final = 3
SIZE: Final = 100


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The threads, on a machine whose processors have other work."""
    if not compilers() or "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no C compiler, or a processor without AVX-512")
    library = tmp_path_factory.mktemp("team") / "team.so"
    source = Path(__file__).with_name("late_threads.c")
    options = [*OPTIONS, "-march=native", f"-I{SOURCES[0].parent}"]
    subprocess.run([*compilers()[0], *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def counted(team: ctypes.CDLL, function: str, calls: int) -> list[int]:
    """Return the different counts of some calls, of which each counts everything."""
    counters = torch.zeros(SIZE, dtype=torch.int64)
    address = ctypes.c_void_p(counters.data_ptr())
    for _ in range(calls):
        getattr(team, function)(ctypes.c_int64(THREADS), address, ctypes.c_int64(SIZE))
    return sorted({int(counter) for counter in counters})


def test_a_call_does_not_wait_for_a_thread_that_gets_no_processor(team: ctypes.CDLL) -> None:
    """On a machine with other work each call waited until all threads had been awake."""
    with ThreadPoolExecutor(1) as caller:
        try:
            for function, expected in (("count_on", 1), ("count_in_step", 3)):
                alone = caller.submit(counted, team, function, 1)
                assert alone.result(LIMIT_S) == [expected]
        finally:
            for _ in range(THREADS - 1):
                team.give_processor()
        # They may come at any time, also between two calls or in the middle of one.
        for function, expected in (("count_on", 2000), ("count_in_step", 6000)):
            assert caller.submit(counted, team, function, 2000).result() == [expected]
