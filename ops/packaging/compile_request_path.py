"""Compile the router's request path of this checkout, unless these sources are compiled already.

    python -m ops.packaging.compile_request_path [--required | --check]

Takes one or two minutes of CPU time. The extension modules go to `build/request_path/DIGEST` (see
isochrone/compiled.py), so they are used only as long as the sources stay as they are. The C
compiler is the system's, or that of the package `ziglang`; Python's headers must be installed.
Without them one line says what is slower; with `--required` that is an error. `--check` compiles
nothing; its exit status is 1 if these sources are not compiled.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from isochrone import compiled
from nodeagent.engine.kernels.cpu.build import compilers

ROOT: Final = Path(__file__).parents[2]
KEPT_MAX: Final = 4
"""Builds that are kept, of the sources compiled last: for switching between branches."""

SLOWER: Final = "the router runs uncompiled, and a short request costs it three times the CPU time"


class CannotCompile(RuntimeError):
    """The request path cannot be compiled here; the text says why and what to do."""


def copy_sources(root: Path, copy: Path) -> None:
    """Copy what the compiler reads, so that an edit while it runs changes nothing."""
    for path in [*compiled.sources(root), root / "pyproject.toml"]:
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def compile_copy(copy: Path, out: Path) -> None:
    """Compile a copy of the sources into `out`. Raises CannotCompile."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotCompile("Python's headers are missing (package python3-dev)")
    commands = compilers()
    if not commands:
        raise CannotCompile("there is no C compiler (packages gcc, libc6-dev)")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(out)]
    lines: list[str] = []
    for command in commands:
        compiler = " ".join(command)
        environment = os.environ | {
            compiled.SETTING: "1",
            "PYTHONPATH": str(copy),
            "CC": compiler,
            "LDSHARED": f"{compiler} -shared",
            "CFLAGS": f"-O{os.environ.get('ISOCHRONE_OPTIMISE', '3')}",
            "ZIG_GLOBAL_CACHE_DIR": str(copy / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(copy / "zig"),
        }
        done = subprocess.run(build, cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return
        lines += [line for line in (done.stderr or done.stdout).splitlines() if "rror" in line][:3]
    raise CannotCompile("; ".join(lines) or "the compiler failed")


def compile_checkout(root: Path) -> Path:
    """Return the folder of a checkout's extension modules, compiled now if they are not there.

    Of several processes that want them, one compiles and the others wait.
    """
    built = compiled.folder(root)
    if built.is_dir():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with built.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return built if built.is_dir() else _compile_into(root, built)


def _compile_into(root: Path, built: Path) -> Path:
    """Compile a checkout; return the folder of its extension modules, `built` without an edit."""
    builds = built.parent
    sys.stderr.write("compiling the router's request path (one or two minutes, once)\n")
    with tempfile.TemporaryDirectory(prefix="new-", dir=builds) as name:
        copy, out = Path(name, "copy"), Path(name, "out")
        copy_sources(root, copy)
        compile_copy(copy, out)
        built = builds / compiled.digest(copy)
        if not built.is_dir():
            out.rename(built)
    old = sorted(
        (path for path in builds.iterdir() if not path.name.startswith("new-")),
        key=lambda path: path.stat().st_mtime,
    )
    for path in old[:-KEPT_MAX]:
        shutil.rmtree(path, ignore_errors=True)
    return built


def main() -> None:
    """Compile, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--required", action="store_true", help="fail if it cannot be compiled")
    parser.add_argument("--check", action="store_true", help="only say whether it is compiled")
    arguments = parser.parse_args()
    if arguments.check:
        raise SystemExit(not compiled.folder(ROOT).is_dir())
    if os.environ.get(compiled.SETTING) == "0" and not arguments.required:
        return
    try:
        compile_checkout(ROOT)
    except (CannotCompile, OSError) as error:
        if arguments.required:
            raise SystemExit(f"cannot compile the request path: {error}") from None
        sys.stderr.write(f"{error}: {SLOWER}\n")


if __name__ == "__main__":
    main()
