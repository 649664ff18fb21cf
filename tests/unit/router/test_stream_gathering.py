"""For how long the thread in C lets tokens gather (router/dataplane/stream_gathering.h)."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from nodeagent.engine.kernels.cpu.build import compilers

HEADER = Path(__file__).parents[3] / "router" / "dataplane" / "stream_gathering.h"
MOST_NS = 1_500_000
WINDOW_NS = 100_000_000


class Gathering(ctypes.Structure):
    """The struct of that name."""

    _fields_ = (
        ("most_ns", ctypes.c_int64),
        ("pause_ns", ctypes.c_int64),
        ("window_began_ns", ctypes.c_int64),
        ("window_reads", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of the header, compiled now."""
    if not compilers():
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c")
    source, library = folder / "gathering.c", folder / "gathering.so"
    source.write_text(
        f'#include "{HEADER}"\n'
        "void note_reads(struct gathering *gathering, int64_t reads, int64_t now_ns) {\n"
        "    count_reads(gathering, reads, now_ns);\n}\n"
    )
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compilers()[0], *options, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.note_reads.argtypes = (ctypes.POINTER(Gathering), ctypes.c_int64, ctypes.c_int64)
    return loaded


@pytest.mark.parametrize(
    ("tokens_per_s", "most_ns", "pause_ns"),
    [
        (0, MOST_NS, 0),
        (1_280, MOST_NS, 0),
        (1_340, MOST_NS, MOST_NS),
        (10_000, MOST_NS, MOST_NS),
        (12_800, MOST_NS, 1_250_000),
        (25_600, MOST_NS, 625_000),
        (200_000, MOST_NS, 80_000),
        (25_600, 0, 0),
        (25_600, 100_000, 100_000),
    ],
)
def test_a_pause_lasts_until_enough_tokens_have_come(
    in_c: ctypes.CDLL, tokens_per_s: int, most_ns: int, pause_ns: int
) -> None:
    gathering = Gathering(most_ns=most_ns)
    reads = tokens_per_s // 10
    # The rate is that of the window before, whenever within it the tokens came.
    in_c.note_reads(gathering, reads // 2, WINDOW_NS // 3)
    assert gathering.pause_ns == 0
    in_c.note_reads(gathering, reads - reads // 2, WINDOW_NS)
    assert gathering.pause_ns == pause_ns
    in_c.note_reads(gathering, 0, 3 * WINDOW_NS // 2)
    assert gathering.pause_ns == pause_ns
    in_c.note_reads(gathering, 0, 2 * WINDOW_NS)
    assert gathering.pause_ns == 0
