"""Extension modules of the request path, compiled from their sources for a test."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from nodeagent.engine.kernels.cpu.build import compilers


def compile_now(source: Path, folder: Path) -> ModuleType:
    """Return the module of this very source; skip the test without a compiler."""
    include = Path(sysconfig.get_path("include"))
    if not compilers() or not (include / "Python.h").is_file():
        pytest.skip("no C compiler with Python's headers")
    name = source.stem
    library = folder / f"{name}.so"
    options = ["-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    options += ["-shared", "-fPIC", "-pthread"]
    options.append(f"-I{include}")
    subprocess.run([*compilers()[0], *options, str(source), "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop(name, None)
    return module
