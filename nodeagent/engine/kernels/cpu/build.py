"""From the C files here to a library for this processor, built once and found again.

A library is named by what it was built from (source, compiler's options, the processor's features),
lies in `$XDG_CACHE_HOME/isochrone`, which only its owner may write, and appears there by a rename
once it is on the disk: neither a start that is cut short nor a power cut leaves half of one, which
would end every process that loads it. Where no compiler is here, or it cannot, there is no library,
and whoever asked goes without.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
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
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_NEEDED: Final = ("avx512f", "avx512bw", "avx512_vnni")
"""What the sources are written for; torch's own kernels are faster on any other processor."""
_COMPILERS: Final = ("cc", "gcc", "clang")
_COMPILE_S: Final = 60.0


class KernelsUnavailable(RuntimeError):
    """The library cannot be built; the message says why."""


def kernels_library() -> Path:
    """Return the library's path, built where it is not there yet, or raise NoKernels."""
    features = _features()
    lacking = sorted(set(_NEEDED) - set(features.split()))
    if lacking:
        raise KernelsUnavailable(f"cannot run kernels: this processor lacks {', '.join(lacking)}")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    path = _folder() / f"kernels-{_digest(compiler, features)}.so"
    if path.is_file():
        return path
    if compiler is None:
        raise KernelsUnavailable(f"cannot build kernels: none of {', '.join(_COMPILERS)} is here")
    log.info("building kernels", extra={"fields": {"compiler": compiler, "library": str(path)}})
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        new = Path(name) / path.name
        command = [compiler, *_OPTIONS, *map(str, SOURCES), "-lm", "-o", str(new)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        except subprocess.CalledProcessError as error:
            told = error.stderr.strip().splitlines()
            raise KernelsUnavailable(
                f"cannot build kernels with {compiler}: {told[0] if told else 'it failed'}"
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsUnavailable(f"cannot build kernels: {error}") from error
        sync(new)
        new.replace(path)
    return path


def _digest(compiler: str | None, features: str) -> str:
    digest = hashlib.sha256()
    for source in (*SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    for part in (*_OPTIONS, platform.machine(), features, compiler or ""):
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
        raise KernelsUnavailable(
            f"cannot keep kernels: {error} XDG_CACHE_HOME would name one."
        ) from error
    folder = root / "isochrone"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise KernelsUnavailable(f"cannot keep kernels in {folder}: others may write there")
        if not os.access(folder, os.W_OK):
            raise KernelsUnavailable(f"cannot keep kernels in {folder}: it cannot be written")
    except OSError as error:
        raise KernelsUnavailable(f"cannot keep kernels in {folder}: {error}") from error
    return folder
