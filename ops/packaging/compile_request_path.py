"""Compile the router's request path of this checkout, unless these sources are compiled already.

    python -m ops.packaging.compile_request_path [--required] [--profile] | [--check]

Takes one or two minutes of CPU time, with `--profile` two more: gcc then knows which branches
requests take, and a request takes a quarter less (`setup.py`). The extension modules go to
`build/request_path/DIGEST` (see isochrone/compiled.py), so they are used only as long as the
sources stay as they are. The C compiler is the system's, or that of the package `ziglang`; Python's
headers must be installed. Without them one line says what is slower; with `--required` that is an
error. `--check` compiles nothing; its exit status is 1 if these sources are not compiled.
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
PROFILED: Final = "profiled"
"""An empty file among the extension modules that were compiled with a profile."""

KEPT_MAX: Final = 4
"""Builds that are kept, of the sources compiled last: for switching between branches."""

SLOWER: Final = "the router runs uncompiled, and a short request costs it three times the CPU time"


class CannotCompile(RuntimeError):
    """The request path cannot be compiled here; the text says why and what to do."""


def can_profile() -> bool:
    """Return whether gcc is here; a line says what is slower without it."""
    if shutil.which("gcc") is not None:
        return True
    sys.stderr.write("there is no gcc (package gcc): requests are not profiled, and cost more\n")
    return False


def copy_sources(root: Path, copy: Path) -> None:
    """Copy what the compiler reads, so that an edit while it runs changes nothing."""
    programs = [root / name for name in compiled.PROFILED_SOURCES]
    for path in [*compiled.sources(root), root / "pyproject.toml", *filter(Path.is_file, programs)]:
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def compile_copy(copy: Path, out: Path, *, is_profiled: bool = False) -> None:
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
            compiled.PROFILE: str(int(is_profiled)),
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


def compile_checkout(root: Path, *, is_profiled: bool = False) -> Path:
    """Return the folder of a checkout's extension modules, compiled now if they are not there.

    Of several processes that want them, one compiles and the others wait. Modules that were
    compiled with a profile are good for those who do not ask for one.
    """
    built = compiled.folder(root)
    if _is_done(built, is_profiled):
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with built.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return built if _is_done(built, is_profiled) else _compile_into(root, built, is_profiled)


def _is_done(built: Path, is_profiled: bool) -> bool:
    return (built / PROFILED).is_file() if is_profiled else built.is_dir()


def _compile_into(root: Path, built: Path, is_profiled: bool) -> Path:
    """Compile a checkout; return the folder of its extension modules, `built` without an edit."""
    builds = built.parent
    minutes = "three or four minutes" if is_profiled else "one or two minutes"
    sys.stderr.write(f"compiling the router's request path ({minutes}, once)\n")
    with tempfile.TemporaryDirectory(prefix="new-", dir=builds) as name:
        copy, out = Path(name, "copy"), Path(name, "out")
        copy_sources(root, copy)
        compile_copy(copy, out, is_profiled=is_profiled)
        if is_profiled:
            (out / PROFILED).touch()
        built = builds / compiled.digest(copy)
        if built.is_dir() and not _is_done(built, is_profiled):
            # Routers that run keep the files that they have loaded.
            built.rename(Path(name, "without-profile"))
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
    parser.add_argument("--profile", action="store_true", help="profile requests in between")
    parser.add_argument("--check", action="store_true", help="only say whether it is compiled")
    arguments = parser.parse_args()
    if arguments.check:
        raise SystemExit(not compiled.folder(ROOT).is_dir())
    if os.environ.get(compiled.SETTING) == "0" and not arguments.required:
        return
    try:
        built = compile_checkout(ROOT, is_profiled=arguments.profile and can_profile())
        if arguments.required:
            sys.stderr.write(f"the router's request path is compiled: {built.relative_to(ROOT)}\n")
    except (CannotCompile, OSError) as error:
        if arguments.required:
            raise SystemExit(f"cannot compile the request path: {error}") from None
        sys.stderr.write(f"{error}: {SLOWER}\n")
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the router's request path is not compiled") from None


if __name__ == "__main__":
    main()
