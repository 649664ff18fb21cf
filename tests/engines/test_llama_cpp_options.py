"""The options that deployments may set are options of a real llama.cpp."""

import re
import subprocess

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.engines.shared_prompts import DRAFTS_OPTION, OWN_DRAFTS, SHARED_CACHE_OPTION
from nodeagent.drivers.llama_cpp import PROGRAM
from tests.engines.real_engines import LLAMA_CPP_COMMANDS, needs_llama_cpp

pytestmark = needs_llama_cpp


def test_llama_cpp_has_our_options_and_kinds_of_drafts() -> None:
    """A kind of drafts that we allow by another name would be refused by the engine only."""
    done = subprocess.run(
        [LLAMA_CPP_COMMANDS / PROGRAM, "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
    options = ENGINE_OPTIONS["llama_cpp"]
    names = options.names - {SHARED_CACHE_OPTION}
    expected = {f"--{name.replace('_', '-')}" for name in names}
    expected |= {f"--no-{name.replace('_', '-')}" for name in options.negatable}
    assert expected <= known, expected - known
    kinds = re.search(rf"--{DRAFTS_OPTION.replace('_', '-')} ([a-z0-9,-]+)", done.stdout)
    assert kinds is not None
    assert set(kinds[1].split(",")) >= OWN_DRAFTS
