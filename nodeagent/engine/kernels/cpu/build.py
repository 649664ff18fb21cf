"""From the C files here to a library for this processor, built once and found again.

A library is named by what it was built from (source, compiler's options, the processor's features),
lies in `$XDG_CACHE_HOME/isochrone`, which only its owner may write, and appears there by a rename
once it is on the disk: neither a start that is cut short nor a power cut leaves half of one, which
would end every process that loads it. Where no compiler is here, or it cannot, there is no library,
and whoever asked goes without.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from isochrone.service.files import sync

log = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent
SOURCES: Final = tuple(sorted(_FOLDER.glob("*.c")))
_HEADERS: Final = tuple(sorted(_FOLDER.glob("*.h")))
_OPTIONS: Final = (
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_NEEDED: Final = ("avx512f", "avx512bw", "avx512_vnni")
"""What the sources are written for; torch's own kernels are faster on any other processor."""
_COMPILERS: Final = ("cc", "gcc", "clang")
_PACKAGED: Final = "ziglang"
"""A Python package with a C compiler; `ops/setup.sh` installs it where the system has none."""
_COMPILE_S: Final = 120.0


class NoKernels(RuntimeError):
    """The library cannot be built; the message says why."""


def built() -> Path:
    """Return the library's path, built where it is not there yet, or raise NoKernels."""
    features = _features()
    lacking = sorted(set(_NEEDED) - set(features.split()))
    if lacking:
        raise NoKernels(f"cannot run kernels: this processor lacks {', '.join(lacking)}")
    compilers = _compilers()
    paths = [_folder() / f"kernels-{_digest(command, features)}.so" for command in compilers]
    for path in paths:
        if path.is_file():
            return path
    failures = []
    for compiler, path in zip(compilers, paths, strict=True):
        try:
            _build(compiler, path)
            return path
        except NoKernels as error:
            failures.append(str(error))
    raise NoKernels(
        "; ".join(failures)
        or "cannot build kernels: there is no C compiler; install the packages gcc and libc6-dev, "
        f"or `pip install {_PACKAGED}`"
    )


def _build(compiler: tuple[str, ...], path: Path) -> None:
    """Compile the library to `path`, or raise NoKernels with the compiler's first words."""
    fields = {"compiler": " ".join(compiler), "library": str(path)}
    log.info("building kernels", extra={"fields": fields})
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        new = Path(name) / path.name
        command = [*compiler, *_OPTIONS, *map(str, SOURCES), "-lm", "-o", str(new)]
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
            raise NoKernels(
                f"cannot build kernels with {compiler[0]}: {lines[0] if lines else 'it failed'}"
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoKernels(f"cannot build kernels: {error}") from error
        sync(new)
        new.replace(path)


def _compilers() -> list[tuple[str, ...]]:
    """Return the commands of the C compilers here, the preferred one first."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    commands: list[tuple[str, ...]] = [(found,)] if found else []
    if importlib.util.find_spec(_PACKAGED) is not None:
        commands.append((sys.executable, "-m", _PACKAGED, "cc"))
    return commands


def _digest(compiler: tuple[str, ...], features: str) -> str:
    digest = hashlib.sha256()
    for source in (*SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    for part in (*_OPTIONS, platform.machine(), features, *compiler):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _features() -> str:
    """Return what this processor can, as the kernel tells it; a library fits no other."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _folder() -> Path:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise NoKernels(f"cannot keep kernels: {error} XDG_CACHE_HOME would name one.") from error
    folder = root / "isochrone"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise NoKernels(f"cannot keep kernels in {folder}: others may write there")
        if not os.access(folder, os.W_OK):
            raise NoKernels(f"cannot keep kernels in {folder}: it cannot be written")
    except OSError as error:
        raise NoKernels(f"cannot keep kernels in {folder}: {error}") from error
    return folder
