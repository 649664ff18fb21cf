"""Install SGLang's own argument parser, without what needs a GPU, to test command lines with.

    python -m ops.engines.sglang_parser [--folder .engines]

Creates FOLDER/sglang (150 MB): the wheel, and the few packages that its parser imports beyond
those of FOLDER/vllm, whose interpreter runs it. The engine itself does not start in this way.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from ops.engines.vllm_cpu import ROOT

VERSION: Final = "0.5.23"
MORE: Final = ("orjson", "pybase64", "pandas")
DISPLAY: Final = "class HTML:\n    pass\n\n\ndef display(*values):\n    pass\n"
"""A stand-in for IPython, from which SGLang imports two names."""


def install(target: Path, python: Path) -> Path:
    """Install into `target` with the interpreter of vLLM's environment; return `target`."""
    done = target / ".complete"
    if done.exists() and done.read_text() == VERSION:
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    package = f"sglang=={VERSION}"
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", target, package], check=True)
    (wheel,) = target.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    wheel.unlink()
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", target, *MORE], check=True)
    stub = target / "IPython"
    stub.mkdir(exist_ok=True)
    (stub / "__init__.py").touch()
    (stub / "display.py").write_text(DISPLAY)
    done.write_text(VERSION)
    return target


def main() -> None:
    """Install, and print where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    folder = parser.parse_args().folder.resolve()
    python = folder / "vllm" / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            "cannot install SGLang's parser: run `python -m ops.engines.vllm_cpu` first"
        )
    sys.stdout.write(f"{install(folder / 'sglang', python)}\n")


if __name__ == "__main__":
    main()
