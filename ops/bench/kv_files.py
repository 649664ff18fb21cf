"""Compares ways to read the block files of the KV file tier, uncached and from the page cache.

    python -m ops.bench.kv_files FOLDER [--blocks N] [--block-kib K] [--rounds R]

Each round reads every file once in each way; before an uncached read the files are dropped from the
page cache. A read ends when all bytes are in memory and their checksum is computed, as in the tier.
FOLDER must be on the disk to measure.
"""

import argparse
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import xxhash

SECTOR = 4096
AHEAD = 4
Read = Callable[[list[Path]], list[int]]


def buffered(paths: list[Path]) -> list[int]:
    """Read each file in one call."""
    return [_whole(path) for path in paths]


def _whole(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        file.readinto(content)
    return xxhash.xxh3_64(content).intdigest()


def advised(paths: list[Path]) -> list[int]:
    """Read each file in one call, after asking the kernel to read the next few ahead."""
    seals = []
    for at, path in enumerate(paths):
        for later in paths[1:AHEAD] if at == 0 else paths[at + AHEAD - 1 : at + AHEAD]:
            advise(later, os.POSIX_FADV_WILLNEED)
        seals.append(_whole(path))
    return seals


def mapped(paths: list[Path]) -> list[int]:
    """Map each file; the checksum faults its pages in."""
    seals = []
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_WILLNEED)
            seals.append(xxhash.xxh3_64(pages).intdigest())
    return seals


class Direct:
    """Read around the page cache (O_DIRECT), into aligned memory that is reused."""

    def __init__(self, block_bytes: int) -> None:
        self._memory = mmap.mmap(-1, -(-block_bytes // SECTOR) * SECTOR)

    def __call__(self, paths: list[Path]) -> list[int]:
        """Read each file."""
        seals = []
        for path in paths:
            with memoryview(self._memory) as whole, whole[: self._read(path)] as content:
                seals.append(xxhash.xxh3_64(content).intdigest())
        return seals

    def _read(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(descriptor, [self._memory], 0)
        finally:
            os.close(descriptor)


def advise(path: Path, how: int) -> None:
    """Give the kernel advice `how` for the whole file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, how)
    finally:
        os.close(descriptor)


def main() -> None:
    """Write the files, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--block-kib", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    block_bytes = arguments.block_kib * 1024 + 63
    paths = [arguments.folder / f"kv-{number}" for number in range(arguments.blocks)]
    for path in paths:
        path.write_bytes(os.urandom(block_bytes))
    os.sync()
    ways: dict[str, Read] = {
        "read": buffered,
        "read, next 3 advised": advised,
        "mmap, willneed": mapped,
        "O_DIRECT": Direct(block_bytes),
    }
    try:
        measure(paths, ways, arguments.rounds, block_bytes)
    finally:
        for path in paths:
            path.unlink()


def measure(paths: list[Path], ways: dict[str, Read], rounds: int, block_bytes: int) -> None:
    """Read all files in each way, in turn, cold and warm, and print the medians."""
    seals: set[tuple[int, ...]] = set()
    taken: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for cold in (True, False):
            for name, read in ways.items():
                for path in paths:
                    if cold:
                        advise(path, os.POSIX_FADV_DONTNEED)
                    else:
                        path.read_bytes()
                began_s = time.perf_counter()
                seals.add(tuple(read(paths)))
                taken.setdefault((name, cold), []).append(time.perf_counter() - began_s)
    assert len(seals) == 1, "not all ways read the same bytes"
    print(f"{len(paths)} blocks of {block_bytes} bytes, {rounds} rounds")
    print(
        "| way | cold, ms a block | MB/s | cached, ms a block | MB/s |\n|---|---:|---:|---:|---:|"
    )
    for name in ways:
        cells = []
        for cold in (True, False):
            each_s = median(taken[name, cold]) / len(paths)
            cells.append(f"{each_s * 1e3:.2f} | {block_bytes / each_s / 1e6:.0f}")
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
