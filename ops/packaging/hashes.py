"""Dependencies pinned by the hashes of their files: writes the list, and checks an installation.

    python3 ops/packaging/hashes.py lock INDEX
    python3 ops/packaging/hashes.py check REPORT...

`lock` reads constraints.txt and writes hashes.txt: for each pinned version the SHA-256 of every
file that a Linux machine may install, as a package index states it; INDEX is its URL. A REPORT is
what `pip install --report` wrote; `check` fails and names each file that was installed and is not
in the list.

pip's own --require-hashes accepts neither the project's folder nor one of two builds of torch (for
CPUs from PyTorch's index, for GPUs with NVIDIA's libraries from PyPI), so files are checked after
they are unpacked and before anything of them has run: only wheels are installed, which run nothing.
Needs the standard library only, because it runs before anything is installed.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

ROOT: Final = Path(__file__).parent.parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
HASHES: Final = Path(__file__).with_name("hashes.txt")
JSON_INDEX: Final = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S: Final = 60
PROJECT: Final = "isochrone"

PYTHONS: Final = ("311", "312", "313")
MACHINES: Final = ("x86_64", "aarch64", "any")
CPU_TORCH: Final = {
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ),
}
"""Files of PyTorch's own index of builds for CPUs, which does not answer in JSON."""


def normal(name: str) -> str:
    """Return a package's name as the index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt by name."""
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {normal(name): version for name, version in pairs}


def _open(url: str, accept: str = "*/*") -> bytes:
    request = Request(url, headers={"accept": accept})  # noqa: S310 - the index that was named
    with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
        content: bytes = response.read()
        return content


def files_of(index: str, name: str) -> list[dict[str, Any]]:
    """Return the files of a package, as the index lists them."""
    files: list[dict[str, Any]] = json.loads(_open(f"{index.rstrip('/')}/{name}/", JSON_INDEX))[
        "files"
    ]
    return files


def serves(filename: str) -> bool:
    """Return whether a wheel may be installed on Linux by one of PYTHONS."""
    if not filename.endswith(".whl"):
        return False
    python, abi, platforms = filename.removesuffix(".whl").split("-")[-3:]
    if not platforms.endswith(MACHINES) or not ("linux" in platforms or platforms == "any"):
        return False
    of_python = any(f"cp{version}" in python.split(".") for version in PYTHONS)
    return abi == "abi3" or "py3" in python.split(".") or (of_python and not abi.endswith("t"))


def hashes_of(index: str, name: str, version: str) -> dict[str, str]:
    """Return the hashes of the version's wheels by their names."""
    found = {}
    for file in files_of(index, name):
        filename = file["filename"]
        if serves(filename) and filename.split("-")[1] == version:
            found[filename] = file["hashes"]["sha256"]
    if not found:
        raise SystemExit(f"cannot lock {name} {version}: the index has no wheel of it for Linux")
    return found


def lock(index: str) -> None:
    """Write the list."""
    versions = pinned()
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(partial(hashes_of, index), versions, versions.values()))
    lines = [f"{digest}  {file}" for table in tables for file, digest in table.items()]
    lines += [f"{digest}  {file}" for file, digest in CPU_TORCH.items()]
    lines.sort(key=lambda line: line.split("  ")[1].lower())
    HASHES.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(lines)} files of {len(versions)} packages\n")


def known_hashes() -> dict[str, str]:
    """Return the files of the list by their hash."""
    lines = HASHES.read_text().splitlines()
    return {line[:64]: line[66:] for line in lines}


def unknown_files(report: dict[str, Any], known: dict[str, str]) -> Iterator[str]:
    """Yield, in words, each installed file of pip's report that is not in the list."""
    for item in report["install"]:
        source = item["download_info"]
        if "dir_info" in source or _is_wheel_of_project(item):
            continue
        # `hash` is what pip before 23.1 writes.
        digest = source.get("archive_info", {}).get("hash", "").removeprefix("sha256=")
        if digest not in known:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            yield f"{name} {version} from {source['url']}: SHA-256 {digest or 'unknown'}"


def _is_wheel_of_project(item: dict[str, Any]) -> bool:
    """Return whether it is a local wheel of Isochrone: the SHA256SUMS beside it are its hashes."""
    is_local = item["download_info"]["url"].startswith("file:")
    return is_local and item.get("is_direct", False) and normal(item["metadata"]["name"]) == PROJECT


def check(paths: Sequence[str]) -> None:
    """Raise SystemExit, with what to do, if a file was installed that is not in the list."""
    known = known_hashes()
    reports = [json.loads(Path(path).read_text()) for path in paths]
    unknown = [line for report in reports for line in unknown_files(report, known)]
    if unknown:
        listed = "\n  ".join(unknown)
        raise SystemExit(
            f"cannot trust what was installed: not in {HASHES.name} are\n  {listed}\nRemove the"
            " virtual environment. After a change of constraints.txt run"
            " `python3 ops/packaging/hashes.py lock INDEX` and review the difference."
        )
    count = sum(len(report["install"]) for report in reports)
    sys.stdout.write(f"packages installed with the pinned hashes: {count}\n")


def main(arguments: Sequence[str]) -> None:
    """Run one of the two commands."""
    if len(arguments) == 2 and arguments[0] == "lock":
        lock(arguments[1])
    elif len(arguments) > 1 and arguments[0] == "check":
        check(arguments[1:])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
