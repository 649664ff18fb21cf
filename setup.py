"""Compiles the router's hot path into the wheel, where a C compiler and Python's headers are.

mypyc makes extension modules of the sources that `isochrone/compiled.py` names, which lie beside
them in the wheel and are loaded in their stead. A named tuple is made by interpreted code wherever
it is defined: what every request makes anew is a plain class.

ISOCHRONE_COMPILED=1 fails where it cannot compile, ISOCHRONE_COMPILED=0 does not compile.
ISOCHRONE_OPTIMISE=0 tries in half of the time whether it compiles: what it makes is slow.
ISOCHRONE_PROFILE=1 compiles the library of all modules twice, with gcc, and lets the first result
relay requests: a quarter less CPU time for a request, for two more minutes of compiling. An
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
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))
from isochrone import compiled

SETTING = os.environ.get(compiled.SETTING, "")
PROFILE = os.environ.get(compiled.PROFILE) == "1"
OPTIMISE = os.environ.get("ISOCHRONE_OPTIMISE", "3")
FLAGS = ["-DNDEBUG", "-fwrapv"]
"""What Python compiles extension modules with; a compiler that CC names is not told so."""

IS_EDITABLE = any(word in sys.argv for word in ("editable_wheel", "develop", "dist_info"))


def can_compile() -> bool:
    """Return whether an extension module can be compiled and linked here."""
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


class ProfiledBuild(build_ext):
    """Compiles the library of all modules with the branches that requests were seen to take.

    A request then takes a quarter less time, with about the same number of instructions
    (ops/bench/relay.md). Code that the requests did not run is compiled as without a profile. Only
    gcc can do this here: clang's profiles need a tool that `ziglang` lacks.
    """

    def build_extensions(self) -> None:
        """Compile the others as usual, then the library twice."""
        library = next(found for found in self.extensions if found.name.endswith("__mypyc"))
        self.extensions.remove(library)
        super().build_extensions()
        self.compiler.set_executables(compiler_so=["gcc", "-fPIC"], linker_so=["gcc", "-shared"])
        self.force = True
        arguments = library.extra_compile_args
        with tempfile.TemporaryDirectory() as folder:
            profile = [f"-fprofile-dir={folder}", "-fprofile-update=single"]
            library.extra_compile_args = [*arguments, "-fprofile-generate", *profile]
            library.extra_link_args = ["-fprofile-generate"]
            self.build_extension(library)
            self.run_requests()
            # Functions that changed their shape, or were not run, have no profile: no error.
            profile += ["-fprofile-use", "-fprofile-partial-training", "-Wno-missing-profile"]
            library.extra_compile_args = [*arguments, *profile, "-Wno-error"]
            library.extra_link_args = []
            self.build_extension(library)

    def run_requests(self) -> None:
        """Relay requests with what is compiled; it writes its profile when it ends."""
        environment = os.environ | {
            compiled.SETTING: str(Path(self.build_lib).resolve()),
            "PYTHONPATH": os.pathsep.join((str(Path.cwd()), os.environ.get("PYTHONPATH", ""))),
        }
        for run in compiled.PROFILED_RUNS:
            subprocess.run([sys.executable, "-m", *run], check=True, env=environment)


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
        extension.extra_compile_args += [*FLAGS, "-fno-plt", "-fvisibility=hidden"]
        extension.extra_compile_args += ["-include", compiled.STRUCT_MEMBERS]
    for source in compiled.C_SOURCES:
        # No fused products and sums: the results are those of the same code in Python.
        name, exact = source.removesuffix(".c").replace("/", "."), [*FLAGS, "-ffp-contract=off"]
        extensions.append(
            Extension(
                name,
                [source],
                depends=list(compiled.C_HEADERS),
                extra_compile_args=exact,
                extra_link_args=["-pthread"],
            )
        )
    commands = {"build_ext": ProfiledBuild} if PROFILE else {}
    setup(ext_modules=extensions, cmdclass=commands)


if SETTING == "1" or (SETTING != "0" and not IS_EDITABLE and can_compile()):
    compiled_setup()
else:
    if not IS_EDITABLE and SETTING != "0":
        sys.stderr.write(
            "no C compiler with Python's headers (packages gcc, libc6-dev, python3-dev):"
            " the router runs uncompiled, and a short request costs it three times the CPU time\n"
        )
    setup()
