"""Install Mooncake beside vLLM: engines of a PoP share KV through its store, or send it.

    python -m ops.engines.mooncake [--folder .engines]

Adds the package (46 MB) to FOLDER/vllm, which `python -m ops.engines.vllm_cpu` creates. Its
libraries need packages of Debian; those that are missing are named. On a CPU vLLM's worker of the
store must not create an event of CUDA, and its connector must not ask which accelerator is in use:
both lines are changed in the installed vLLM.
"""

import argparse
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from ops.engines.vllm_cpu import ROOT

VERSION: Final = "0.3.13.post1"
PACKAGE: Final = f"mooncake-transfer-engine-non-cuda=={VERSION}"

DEBIAN: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
}
"""The libraries that Mooncake loads, and the packages of Debian 12 that have them."""

FOLDER: Final = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake"
WORKER: Final = f"{FOLDER}/store/worker.py"
CUDA_EVENT: Final = """\
                current_event = torch.cuda.Event()
                current_event.record()
                break
"""
NO_EVENT_ON_CPU: Final = """\
                if torch.cuda.is_available():
                    current_event = torch.cuda.Event()
                    current_event.record()
                break
"""
CONNECTOR: Final = f"{FOLDER}/mooncake_connector.py"
DEVICE: Final = """\
        self.device_id = torch.accelerator.current_device_index()
"""
NO_DEVICE_ON_CPU: Final = """\
        self.device_id = 0
        if torch.accelerator.is_available():
            self.device_id = torch.accelerator.current_device_index()
"""


class Change(NamedTuple):
    """A part of a file of vLLM, and what takes its place."""

    path: str
    before: str
    after: str

    def made_in(self, source: str) -> str:
        """Return the file's text with the change, also if it is there already.

        Raises ValueError if the text is of a version that the change is not for.
        """
        if self.after in source:
            return source
        if source.count(self.before) != 1:
            raise ValueError(f"cannot change {self.path}: it is not that of the vLLM tested here")
        return source.replace(self.before, self.after)


CHANGES: Final = (
    Change(WORKER, CUDA_EVENT, NO_EVENT_ON_CPU),
    Change(CONNECTOR, DEVICE, NO_DEVICE_ON_CPU),
)


def missing_packages() -> list[str]:
    """Return the packages of Debian whose libraries cannot be loaded here."""
    missing = []
    for library, package in DEBIAN.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def install(environment: Path) -> Path:
    """Install into vLLM's environment; return the program of the store's master."""
    commands = environment / "bin"
    pip: list[str | Path] = [commands / "python", "-m", "pip", "--disable-pip-version-check"]
    (packages,) = environment.glob("lib/python*/site-packages")
    if not any(packages.glob(f"mooncake_transfer_engine_non_cuda-{VERSION}.dist-info/RECORD")):
        # vLLM has all that it needs.
        subprocess.run([*pip, "install", "-q", "--no-deps", PACKAGE], check=True)
    for change in CHANGES:
        file = packages / change.path
        changed = change.made_in(source := file.read_text())
        if changed != source:
            file.write_text(changed)
    return commands / "mooncake_master"


def main() -> None:
    """Install, and print where the master is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    environment = parser.parse_args().folder.resolve() / "vllm"
    if not (environment / ".complete").exists():
        raise SystemExit("cannot install Mooncake: run `python -m ops.engines.vllm_cpu` first")
    if missing := missing_packages():
        names = " ".join(missing)
        raise SystemExit(f"cannot use Mooncake: run `apt-get install {names}` first")
    sys.stdout.write(f"{install(environment)}\n")


if __name__ == "__main__":
    main()
