"""What a process has in memory, for programs that look for what it never frees."""

import asyncio
import ctypes
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil
from aiohttp import web

PATH: Final = "/memory"


class ProcessSizes(NamedTuple):
    """Resident bytes of a process, those of its own and those of shared memory; its descriptors."""

    rss: int
    anon: int
    shmem: int
    descriptors: int


def process_sizes(pid: int) -> ProcessSizes:
    """Return what the kernel knows of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    rss, anon, shmem = (
        1024 * int(sizes[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem")
    )
    return ProcessSizes(rss, anon, shmem, psutil.Process(pid).num_fds())


class MemoryCounts(msgspec.Struct, frozen=True):
    """The objects and tasks of a process, and the memory that malloc has from the system.

    `malloc_used` bytes are in use. `malloc_free` are not, but lie between others that are.
    """

    objects: dict[str, int]
    """By type; only those that the garbage collector tracks."""
    blocks: int
    """Pieces of memory that the interpreter has in use."""
    tasks: int
    malloc_used: int
    malloc_free: int


class _MallocInfo(ctypes.Structure):
    """The struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory_counts() -> MemoryCounts:
    """Count what this process has."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    objects = Counter(
        f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()
    )
    return MemoryCounts(
        objects=dict(objects),
        blocks=sys.getallocatedblocks(),
        tasks=len(asyncio.all_tasks()),
        malloc_used=info.uordblks + info.hblkhd,
        malloc_free=info.fordblks,
    )


async def answer_counts(_: web.Request) -> web.Response:
    """Answer with the counts of this process."""
    return web.Response(body=msgspec.json.encode(memory_counts()))
