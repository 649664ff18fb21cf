"""Compiles the router's hot path into the wheel, where a C compiler and Python's headers are.

mypyc makes extension modules of the sources that `isochrone/compiled.py` names, which lie beside
them in the wheel and are loaded in their stead. A named tuple is made by interpreted code wherever
it is defined: what every request makes anew is a plain class.

ISOCHRONE_COMPILED=1 fails where it cannot compile, ISOCHRONE_COMPILED=0 does not compile.
ISOCHRONE_OPTIMISE=0 tries in half of the time whether it compiles: what it makes is slow. An
editable installation never has extension modules beside its sources, where they would hide every
later edit: ops/packaging/compile_request_path.py puts them where they cannot.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent))
from isochrone import compiled

SETTING = os.environ.get(compiled.SETTING, "")
OPTIMISE = os.environ.get("ISOCHRONE_OPTIMISE", "3")
IS_EDITABLE = any(word in sys.argv for word in ("editable_wheel", "develop", "dist_info"))


def can_compile() -> bool:
    """Say whether an extension module can be compiled and linked here."""
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    include = f"-I{sysconfig.get_path('include')}"
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return Py_IsInitialized(); }\n")
        options = ["-shared", "-fPIC", include, str(source), "-o", str(source.with_suffix(".so"))]
        try:
            return subprocess.run([*command, *options], capture_output=True).returncode == 0
        except OSError:
            return False


def compiled_setup() -> None:
    """Set up with extension modules. mypyc reads types: it needs whatever the sources import."""
    # Imported before it: mypyc looks whether setuptools is there.
    try:
        from mypyc.build import mypycify
    except ImportError:
        # The first pass of an isolated build asks only what to install for the next.
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        setup(setup_requires=["mypy>=2.4", *project["dependencies"]])
        return
    hot = compiled.hot_modules(Path())
    extensions = mypycify(hot, opt_level=OPTIMISE, debug_level="0", group_name=compiled.GROUP)
    for extension in extensions:
        # One library of its own: its functions call one another without asking the linker's table.
        extension.extra_compile_args += ["-fno-plt", "-fvisibility=hidden"]
        extension.extra_compile_args += ["-include", compiled.STRUCT_MEMBERS]
    for source in compiled.C_SOURCES:
        # No fused products and sums: the results are those of the same code in Python.
        name, exact = source.removesuffix(".c").replace("/", "."), ["-ffp-contract=off"]
        extensions.append(
            Extension(
                name,
                [source],
                depends=list(compiled.C_HEADERS),
                extra_compile_args=exact,
                extra_link_args=["-pthread"],
            )
        )
    setup(ext_modules=extensions)


if SETTING == "1" or (SETTING != "0" and not IS_EDITABLE and can_compile()):
    compiled_setup()
else:
    if not IS_EDITABLE and SETTING != "0":
        sys.stderr.write(
            "no C compiler with Python's headers (packages gcc, libc6-dev, python3-dev):"
            " the router runs uncompiled, and a short request costs it three times the CPU time\n"
        )
    setup()
