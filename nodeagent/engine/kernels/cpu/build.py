"""Provides the library of C kernels for this processor: prebuilt in the wheel, or compiled here.

A library compiled here is named by a digest of its source, the compiler and its options, and the
processor's features. The library is kept in `$XDG_CACHE_HOME/isochrone`, which only its owner may
write, and is renamed into place once it is on disk: an interrupted start or a power cut never
leaves a partial library, which would crash every process that loads it. Without a prebuilt library
and without a working compiler there are no kernels, and the caller uses torch's.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.service.files import sync

log = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent
SOURCES: Final = tuple(sorted(_FOLDER.glob("*.c")))
_HEADERS: Final = tuple(sorted(_FOLDER.glob("*.h")))
OPTIONS: Final = (
    "-O3",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_NEEDED: Final = ("avx512f", "avx512bw", "avx512_vnni")
"""Processor features that the sources require; on any other processor torch's are faster."""


class Variant(NamedTuple):
    """A set of processor features that a wheel contains a library for."""

    name: str
    zig_cpu: str
    features: tuple[str, ...]


_V4: Final = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
VARIANTS: Final = (
    Variant(
        "amx",
        "x86_64_v4+avx512vnni+amx_tile+amx_int8+amx_bf16",
        (*_V4, "amx_tile", "amx_int8", "amx_bf16"),
    ),
    Variant("avx512", "x86_64_v4+avx512vnni", _V4),
)
"""The preferred one first."""
PREBUILT_FOLDER: Final = _FOLDER / "prebuilt"
_COMPILERS: Final = ("cc", "gcc", "clang")
_PACKAGED: Final = "ziglang"
"""A Python package with a C compiler; `ops/setup.sh` installs it where the system has none."""
_COMPILE_S: Final = 600.0
"""Of ten seconds of work. An engine has a tenth of other processes' weight: on a busy machine this
took more than 120 s. Without kernels the engine is several times slower until its next start."""


class KernelsUnavailable(RuntimeError):
    """The library cannot be built; the message says why."""


def kernels_library() -> Path:
    """Return the library's path, built where it is not there yet, or raise KernelsUnavailable."""
    features = _features()
    lacking = sorted(set(_NEEDED) - set(features.split()))
    if lacking:
        raise KernelsUnavailable(f"cannot run kernels: this processor lacks {', '.join(lacking)}")
    for variant in VARIANTS:
        path = PREBUILT_FOLDER / prebuilt_name(variant)
        if set(variant.features) <= set(features.split()) and path.is_file():
            return path
    commands = compilers()
    paths = [_folder() / f"kernels-{_digest(command, features)}.so" for command in commands]
    for path in paths:
        if path.is_file():
            return path
    failures = []
    for compiler, path in zip(commands, paths, strict=True):
        try:
            with _alone(path.parent):
                if not path.is_file():
                    _build(compiler, path)
            return path
        except KernelsUnavailable as error:
            failures.append(str(error))
    raise KernelsUnavailable(
        "; ".join(failures)
        or "cannot build kernels: there is no C compiler; install the packages gcc and libc6-dev, "
        f"or `pip install {_PACKAGED}`"
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process build: an engine and its standby, which start together, need one library."""
    with (folder / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prebuilt_name(variant: Variant) -> str:
    """Return the file name of a variant's library, which changes with the source."""
    return f"kernels-{variant.name}-{_source_digest().hexdigest()[:16]}.so"


def _build(compiler: tuple[str, ...], path: Path) -> None:
    """Compile the library to `path`; raise KernelsUnavailable with the compiler's first line."""
    fields = {"compiler": " ".join(compiler), "library": str(path)}
    log.info("building kernels", extra={"fields": fields})
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        new = Path(name) / path.name
        command = [*compiler, "-march=native", *OPTIONS, *map(str, SOURCES), "-lm", "-o", str(new)]
        # The packaged compiler keeps what it builds of libc; nothing needs it afterwards.
        caches = {"ZIG_GLOBAL_CACHE_DIR": name, "ZIG_LOCAL_CACHE_DIR": name}
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMPILE_S,
                env=os.environ | caches,
            )
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            raise KernelsUnavailable(
                f"cannot build kernels with {compiler[0]}: {lines[0] if lines else 'it failed'}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(
                f"cannot build kernels with {compiler[0]}: not done after {_COMPILE_S:g} s; when"
                " the machine is less busy, start the engine again"
            ) from error
        except OSError as error:
            raise KernelsUnavailable(f"cannot build kernels: {error}") from error
        sync(new)
        new.replace(path)


def compilers() -> list[tuple[str, ...]]:
    """Return the commands of the C compilers here, the preferred one first."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    commands: list[tuple[str, ...]] = [(found,)] if found else []
    if importlib.util.find_spec(_PACKAGED) is not None:
        commands.append((sys.executable, "-m", _PACKAGED, "cc"))
    return commands


def _digest(compiler: tuple[str, ...], features: str) -> str:
    digest = _source_digest()
    for part in (*OPTIONS, platform.machine(), features, *compiler):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _source_digest() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for source in (*SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    return digest


def _features() -> str:
    """Return what this processor can, as the kernel tells it; a library fits no other."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _folder() -> Path:
    """Return the folder of compiled libraries, created if missing.

    Raises KernelsUnavailable if it is unsafe.

    A user that can write the folder, replace it, or point a link of that name elsewhere could make
    the engine load another library.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise KernelsUnavailable(
            f"cannot keep kernels: {error} Set XDG_CACHE_HOME to a folder."
        ) from error
    folder = root / "isochrone"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, parent = folder.lstat(), root.stat()
    except OSError as error:
        raise KernelsUnavailable(f"cannot keep kernels in {folder}: {error}") from error
    if stat.S_ISLNK(status.st_mode):
        raise KernelsUnavailable(
            f"cannot keep kernels in {folder}: it is a symbolic link; use a folder"
        )
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelsUnavailable(
            f"cannot keep kernels in {folder}: other users may write there; chmod 700"
        )
    shared = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    if shared or parent.st_uid not in (0, os.getuid()):
        raise KernelsUnavailable(
            f"cannot keep kernels in {folder}: other users may replace it in {root}"
        )
    if not os.access(folder, os.W_OK):
        raise KernelsUnavailable(f"cannot keep kernels in {folder}: it is not writable")
    return folder
