"""Build llama.cpp's own server from the source that the package llama-cpp-python contains.

    python -m ops.engines.llama_cpp [--folder .engines]

Creates FOLDER/llama_cpp/bin/llama-server and llama-quantize, for this machine's processor, and
FOLDER/smollm2-gguf with the chat model's GGUF file, as published and as Q4_0. Needs a C++ compiler;
takes about eight minutes of two cores. Existing files are kept, and a build that was interrupted
goes on. Not part of `make test-engines`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from ops.engines.vllm_cpu import ROOT, small_chat_model

VERSION: Final = "0.3.36"
"""The version of llama-cpp-python; its llama.cpp calls itself 0.5.0."""

TOOLS: Final = ("cmake", "ninja", "scikit-build-core")
PROGRAMS: Final = ("llama-server", "llama-quantize")
AMX_HEADER: Final = Path(__file__).with_name("amx_tiles.h")
SETTINGS: Final = (
    # Without it the server dies of SIGILL on a processor with a matrix unit, if gcc is before 13.
    f"CMAKE_CXX_FLAGS=-include {AMX_HEADER}",
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=ON"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF"),
    # The web interface would be downloaded, and TLS is not needed on a Unix socket.
    *("LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"),
)


def install(target: Path) -> Path:
    """Build the programs into `target`; return their folder."""
    commands = target / "bin"
    done = target / ".complete"
    if done.exists() and done.read_text() == VERSION:
        return commands
    if shutil.which("c++") is None:
        raise SystemExit("cannot build llama.cpp: install a C++ compiler (g++) first")
    commands.mkdir(parents=True, exist_ok=True)
    folder = target / f"build-{VERSION}"
    source, tools = _unpacked(folder), folder / "tools" / "bin"
    build, ninja = folder / "build", tools / "ninja"
    settings = [f"-D{setting}" for setting in (*SETTINGS, f"CMAKE_MAKE_PROGRAM={ninja}")]
    cmake: list[str | Path] = [tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *settings]
    subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
    jobs = str(os.cpu_count() or 1)
    compilation: list[str | Path] = [ninja, "-C", build, "-j", jobs, *PROGRAMS]
    subprocess.run(compilation, check=True, stdout=subprocess.DEVNULL)
    for program in PROGRAMS:
        shutil.copy2(build / "bin" / program, commands / program)
    shutil.rmtree(folder)
    done.write_text(VERSION)
    return commands


def _unpacked(folder: Path) -> Path:
    """Return the source in `folder`, beside the tools that build it; get what is missing."""
    unpacked = folder / ".unpacked"
    if not unpacked.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
        python = folder / "tools" / "bin" / "python"
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", *TOOLS], check=True)
        # Only the source is wanted: without isolation pip prepares no build of its own.
        options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder)
        package = f"llama-cpp-python=={VERSION}"
        download: list[str | Path] = [*pip, "download", "-q", *options, package]
        subprocess.run(download, check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        unpacked.touch()
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


def prepare_model(commands: Path, gguf: Path, folder: Path) -> Path:
    """Write the chat model's GGUF file and its Q4_0 below `folder`, each in a folder; return it."""
    for name in ("published", "q4_0"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    published, q4_0 = folder / "published" / gguf.name, folder / "q4_0" / "model.gguf"
    if not published.exists():
        shutil.copy2(gguf, published)
    if not q4_0.exists():
        quantize: list[str | Path] = [
            commands / "llama-quantize",
            "--allow-requantize",
            published,
            q4_0,
            "Q4_0",
        ]
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def main() -> None:
    """Build and prepare, and print where both are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    folder = parser.parse_args().folder.resolve()
    commands = install(folder / "llama_cpp")
    models = prepare_model(commands, small_chat_model(), folder / "smollm2-gguf")
    sys.stdout.write(f"{commands / 'llama-server'}\n{models}\n")


if __name__ == "__main__":
    main()
