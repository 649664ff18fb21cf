"""A row that a journal's file has taken is on disk, whatever happens to the process or the file."""

import importlib.util
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from router.recording import journal_file
from router.recording.journal_file import JournalFile, WrittenFile
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router/recording/mapped_file.c"
BYTES_MAX = 1 << 20
ROW = b"r" * 1000

KILLED = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("mapped_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
file = module.MappedFile(os.open(sys.argv[2], os.O_RDWR | os.O_CREAT), 1 << 20)
for _ in range(100):
    file.append(b"r" * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""

BUS_ERROR_ELSEWHERE = """
import importlib.util, mmap, os, sys
spec = importlib.util.spec_from_file_location("mapped_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
file = module.MappedFile(os.open(sys.argv[2], os.O_RDWR | os.O_CREAT), 1 << 20)
file.append(b"r" * 1000)
other = os.open(sys.argv[2] + ".other", os.O_RDWR | os.O_CREAT)
os.ftruncate(other, 4096)
memory = mmap.mmap(other, 4096)
os.ftruncate(other, 0)
memory[0]
"""

NewFile = Callable[[], JournalFile]


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture(params=["in Python", "in C"])
def new_file(request: pytest.FixtureRequest, in_c: ModuleType, path: Path) -> NewFile:
    kind = WrittenFile if request.param == "in Python" else in_c.MappedFile

    def make() -> JournalFile:
        file: JournalFile = kind(os.open(path, os.O_RDWR | os.O_CREAT), BYTES_MAX)
        return file

    return make


@pytest.fixture
def limited_size() -> Iterator[Callable[[int], None]]:
    """Limits how large files may become, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def rows_of(path: Path) -> bytes:
    """Return a file without the space for more rows."""
    return path.read_bytes().rstrip(b"\0")


def test_rows_are_in_the_file_as_soon_as_they_are_appended(new_file: NewFile, path: Path) -> None:
    file = new_file()
    assert path.stat().st_size == 0, "a file without rows takes no space"
    for count in range(1, 200):
        file.append(b"%d;" % count)
        assert rows_of(path) == b"".join(b"%d;" % number for number in range(1, count + 1))
    file.close()


def test_rows_of_many_sizes_follow_one_another(new_file: NewFile, path: Path) -> None:
    file, whole = new_file(), b""
    for size in (1, 65_535, 1, 65_536, 3, 200_000, 4095, 4096):
        row = bytes([1 + size % 255]) * size
        file.append(row)
        whole += row
    file.close()
    assert rows_of(path) == whole


def test_a_full_file_takes_no_row(new_file: NewFile, path: Path) -> None:
    file = new_file()
    file.append(b"r" * (BYTES_MAX - 10))
    with pytest.raises(OSError, match="File too large"):
        file.append(b"s" * 11)
    file.append(b"t" * 10)
    file.close()
    assert path.read_bytes() == b"r" * (BYTES_MAX - 10) + b"t" * 10


def test_a_full_disk_takes_rows_again_once_it_has_space(
    new_file: NewFile, path: Path, limited_size: Callable[[int], None]
) -> None:
    file = new_file()
    limited_size(1500)
    file.append(ROW)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.append(ROW)
    limited_size(BYTES_MAX)
    for _ in range(100):
        file.append(ROW)
    file.close()
    assert rows_of(path) == ROW * 101


def test_what_a_closed_file_is_told_is_refused(new_file: NewFile) -> None:
    file = new_file()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.append(ROW)


def test_a_killed_process_loses_no_row(in_c: ModuleType, path: Path) -> None:
    assert in_c.__file__ is not None
    command = [sys.executable, "-c", KILLED, in_c.__file__, str(path)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert rows_of(path) == ROW * 100


def test_a_file_whose_memory_is_lost_is_written_to(in_c: ModuleType, path: Path) -> None:
    file = in_c.MappedFile(os.open(path, os.O_RDWR | os.O_CREAT), BYTES_MAX)
    file.append(ROW)
    # As with a disk that fails: what is mapped there cannot be had any more.
    os.truncate(path, 0)
    for _ in range(100):
        file.append(ROW)
    file.close()
    assert path.read_bytes() == bytes(1000) + ROW * 100


def test_a_bus_error_elsewhere_ends_the_process(in_c: ModuleType, path: Path) -> None:
    assert in_c.__file__ is not None
    command = [sys.executable, "-c", BUS_ERROR_ELSEWHERE, in_c.__file__, str(path)]
    assert subprocess.run(command).returncode == -signal.SIGBUS


def test_c_refuses_what_is_no_row(in_c: ModuleType, path: Path) -> None:
    file = in_c.MappedFile(os.open(path, os.O_RDWR | os.O_CREAT), BYTES_MAX)
    with pytest.raises(TypeError):
        file.append("row")
    with pytest.raises(TypeError):
        in_c.MappedFile("rows", BYTES_MAX)


def test_the_compiled_path_maps_its_journal() -> None:
    is_in_c = journal_file.new_journal_file is not WrittenFile
    assert is_in_c == (importlib.util.find_spec("router.recording.mapped_file") is not None)
