"""Compiles the router's hot path where that is asked for: `ISOCHRONE_COMPILED=1 pip install .`

mypyc makes extension modules of the sources named here, which lie beside them and are loaded in
their stead. Left out are modules that hold structs, which only msgspec can make, and those
that no request passes through. A named tuple is made by interpreted code wherever it is defined:
what every request makes anew is a plain class.
"""

import os
import tomllib
from pathlib import Path

from setuptools import setup

HOT = (
    "isochrone/wire/keys.py",
    "router/admission_queue.py",
    "router/apis/dispatch.py",
    "router/apis/openai/decode.py",
    "router/apis/openai/prompt.py",
    "router/apis/openai/surface.py",
    "router/apis/request_ids.py",
    "router/attempt_runner.py",
    "router/dataplane/body_admission.py",
    "router/dataplane/body_inflater.py",
    "router/dataplane/deadlines.py",
    "router/dataplane/exchange.py",
    "router/dataplane/http1.py",
    "router/dataplane/http_messages.py",
    "router/dataplane/inline_task.py",
    "router/dataplane/node_connection.py",
    "router/dataplane/request_reader.py",
    "router/dataplane/response_checks.py",
    "router/dataplane/server.py",
    "router/dataplane/sse.py",
    "router/dataplane/upstream.py",
    "router/decide/[a-z]*.py",
    "router/feedback.py",
    "router/fleet_state.py",
    "router/inference_request.py",
    "router/pipeline.py",
    "router/poison_guard.py",
    "router/proxy_headers.py",
    "router/record.py",
    "router/request_context.py",
    "router/request_counts.py",
    "router/usage_journal.py",
)


def compiled() -> None:
    """Set up with extension modules. mypyc reads types: it needs whatever the sources import."""
    # Imported before it: mypyc looks whether setuptools is there.
    try:
        from mypyc.build import mypycify
    except ImportError:
        # The first pass of an isolated build asks only what to install for the next.
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        setup(setup_requires=["mypy>=1.19", *project["dependencies"]])
        return
    sources = [str(path) for name in HOT for path in sorted(Path().glob(name))]
    extensions = mypycify(sources, debug_level="0", group_name="router")
    for extension in extensions:
        # One library of its own: its functions call one another without asking the linker's table.
        extension.extra_compile_args += ["-fno-plt", "-fvisibility=hidden"]
    setup(ext_modules=extensions)


if os.environ.get("ISOCHRONE_COMPILED") == "1":
    compiled()
else:
    setup()
