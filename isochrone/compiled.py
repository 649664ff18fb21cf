"""Finds the compiled request path of a checkout: extension modules made from exactly its sources.

A wheel has its extension modules beside the sources, where Python finds them by itself. A checkout
has them in `build/request_path/DIGEST`, where DIGEST is of every source that the compiler read. A
source that was edited since has another digest, so a stale extension module is never loaded: the
sources run instead until `python -m ops.packaging.compile_request_path` has compiled them again.

In a checkout the environment variable ISOCHRONE_COMPILED chooses: `0` runs the sources, `1` refuses
to start without extension modules, the path of a folder uses those in it, whatever they were made
from, and otherwise those of the sources are used if they are there.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

HOT: Final = (
    "isochrone/fair_shares.py",
    "isochrone/wire/client_keys/keys.py",
    "isochrone/wire/http/json_body.py",
    "isochrone/wire/http/replica_list.py",
    "router/admission_queue.py",
    "router/apis/dispatch.py",
    "router/apis/openai/decode.py",
    "router/apis/openai/long_texts.py",
    "router/apis/openai/prompt.py",
    "router/apis/openai/surface.py",
    "router/apis/request_ids.py",
    "router/attempt_runner.py",
    "router/dataplane/body_admission.py",
    "router/dataplane/body_inflater.py",
    "router/dataplane/deadlines.py",
    "router/dataplane/exchange.py",
    "router/dataplane/generated_text.py",
    "router/dataplane/http1.py",
    "router/dataplane/http_messages.py",
    "router/dataplane/inline_task.py",
    "router/dataplane/media_relay.py",
    "router/dataplane/node_connection.py",
    "router/dataplane/partial_frame.py",
    "router/dataplane/plain_socket.py",
    "router/dataplane/pumped_stream.py",
    "router/dataplane/request_reader.py",
    "router/dataplane/response_checks.py",
    "router/dataplane/server.py",
    "router/dataplane/sse.py",
    "router/dataplane/stream_head.py",
    "router/dataplane/token_gatherer.py",
    "router/dataplane/token_pump.py",
    "router/dataplane/upload_spool.py",
    "router/dataplane/upstream.py",
    "router/dataplane/usage_count.py",
    "router/decide/[a-z]*.py",
    "router/decide/*/[a-z]*.py",
    "router/feedback.py",
    "router/fleet_state.py",
    "router/inference_request.py",
    "router/pipeline.py",
    "router/poison_guard.py",
    "router/proxy_headers.py",
    "router/recording/record.py",
    "router/request_context.py",
    "router/recording/request_counts.py",
    "router/recording/usage_journal.py",
)
"""The modules that are compiled, as patterns. Left out are modules with structs, which only msgspec
can make, and those that no request passes through."""

INTERPRETED: Final = frozenset({"router/decide/replicas/columns_in_numpy.py"})
"""Modules that the patterns match but that only uncompiled routers use."""

C_SOURCES: Final = (
    "isochrone/wire/http/body_bytes.c",
    "router/apis/openai/text_bytes.c",
    "router/dataplane/body_buffer.c",
    "router/dataplane/head_bytes.c",
    "router/dataplane/stream_pump.c",
    "router/decide/caches/block_table.c",
    "router/decide/replicas/column_scan.c",
    "router/recording/mapped_file.c",
)
"""Extension modules that are written in C."""

STRUCT_MEMBERS: Final = "isochrone/struct_members.h"
"""The C header that each generated file begins with."""

C_HEADERS: Final = (
    STRUCT_MEMBERS,
    "isochrone/wire/http/base64_letters.h",
    "router/dataplane/stream_frames.h",
    "router/dataplane/stream_gathering.h",
)

GROUP: Final = "router"
"""The library that holds the code of all modules is named after it."""

PROFILE: Final = "ISOCHRONE_PROFILE"
PROFILED_RUNS: Final = (
    ("ops.bench.relay_instructions", "--sizes", "0", "4", "16", "100", "--requests", "100"),
    (
        *("ops.bench.relay_instructions", "--sizes", "16", "--requests", "100"),
        *("--rate", "5000", "--prefill", "2"),
    ),
    ("ops.bench.relay_instructions", "--stream", "--sizes", "0", "--requests", "500"),
)
"""The programs that show the C compiler which branches are taken (`setup.py`)."""

_PROFILED: Final = ("__init__", "bench/__init__", "bench/backend", "bench/bench_router")
PROFILED_SOURCES: Final = tuple(
    f"ops/{name}.py" for name in (*_PROFILED, "bench/relay", "bench/relay_instructions")
)
"""The files that these programs need, beside the sources of the compiled modules."""

SETTING: Final = "ISOCHRONE_COMPILED"
ROOT: Final = Path(__file__).parents[1]
BUILDS: Final = Path("build", "request_path")
_READ: Final = (
    "setup.py",
    *C_SOURCES,
    *C_HEADERS,
    "isochrone/*.py",
    "isochrone/wire",
    "isochrone/service",
    "router",
)
"""The files of this project that the compiler reads. It also builds constants and types of
uncompiled modules into the compiled ones."""


def hot_modules(root: Path) -> list[str]:
    """Return the paths of the modules to compile, relative to `root`."""
    found = [str(path.relative_to(root)) for name in HOT for path in sorted(root.glob(name))]
    return [path for path in found if path not in INTERPRETED]


def sources(root: Path) -> list[Path]:
    """Return the files of a checkout that its compiled request path depends on."""
    found: list[Path] = []
    for name in _READ:
        folder = root / name
        found += sorted(folder.rglob("*.py") if folder.is_dir() else root.glob(name))
    return found


def digest(root: Path) -> str:
    """Return the digest of a checkout's sources and of the interpreter that extensions fit."""
    hashed = hashlib.sha256(EXTENSION_SUFFIXES[0].encode())
    for path in sources(root):
        text = path.read_bytes()
        hashed.update(f"\0{path.relative_to(root)}\0{len(text)}\0".encode())
        hashed.update(text)
    return hashed.hexdigest()[:32]


def folder(root: Path = ROOT) -> Path:
    """Return where the compiled request path of a checkout is, or would be."""
    return root / BUILDS / digest(root)


class CompiledRequestPath(MetaPathFinder):
    """Finds the extension modules of a checkout before Python finds their sources."""

    def __init__(self, root: Path, built: Path | None = None) -> None:
        """Look in `built`, by default where those of the checkout `root` are."""
        self._root = root
        self._hot: dict[str, str] | None = None
        self._folder = built

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the extension module `fullname`, None if it is not a compiled one."""
        if not fullname.startswith(("router", "isochrone.wire.", "isochrone.fair_shares")):
            return None
        name = self._files().get(fullname)
        if name is None or self._folder is None:
            return None
        file = str(self._folder / name)
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))

    def _files(self) -> dict[str, str]:
        """Return the file of each extension module; read the sources when it is first needed."""
        if self._hot is None:
            suffix = EXTENSION_SUFFIXES[0]
            stems = [name.removesuffix(".py") for name in hot_modules(self._root)]
            stems += [f"{GROUP}__mypyc", *(name.removesuffix(".c") for name in C_SOURCES)]
            self._hot = {stem.replace("/", "."): stem + suffix for stem in stems}
            if self._folder is None and (built := folder(self._root)).is_dir():
                self._folder = built
            if self._folder is None and os.environ.get(SETTING) == "1":
                raise ImportError(
                    f"cannot load the compiled request path: these sources are not compiled;"
                    f" run `make compiled`, or unset {SETTING}"
                )
        return self._hot


def install() -> None:
    """Use the compiled request path of this checkout, if there may be one and it is wanted."""
    setting = os.environ.get(SETTING, "")
    is_checkout = (ROOT / "setup.py").is_file()
    if is_checkout and "/" in setting:
        sys.meta_path.insert(0, CompiledRequestPath(ROOT, Path(setting)))
    elif is_checkout and (setting == "1" or (setting != "0" and (ROOT / BUILDS).is_dir())):
        sys.meta_path.insert(0, CompiledRequestPath(ROOT))
