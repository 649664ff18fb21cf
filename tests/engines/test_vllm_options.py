"""vLLM's own argument parser knows every option that we let a deployment set."""

import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from isochrone.wire.engine_options import ENGINE_OPTIONS

ENGINES: Final = Path(os.environ.get("ISOCHRONE_ENGINES", Path(__file__).parents[2] / ".engines"))
PYTHON: Final = ENGINES / "vllm" / "bin" / "python"
SCRIPT: Final = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps({action.dest: [action.nargs == 0, action.option_strings] for action in actions}))
"""


@pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"no vLLM below {ENGINES}: run `make test-engines`, which installs it",
)
def test_vllm_has_our_options_as_values_and_flags() -> None:
    done = subprocess.run([PYTHON, "-c", SCRIPT], capture_output=True, text=True, check=True)
    known: dict[str, tuple[bool, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    options = ENGINE_OPTIONS["vllm"]
    # `kv_connector` is the driver's own, and becomes a kv_transfer_config.
    names = options.names - {"kv_connector"}
    assert names <= known.keys()
    for name in names:
        is_flag, strings = known[name]
        assert is_flag == options.is_flag(name), name
        argument = name.replace("_", "-")
        assert f"--{argument}" in strings
        assert name not in options.negatable or f"--no-{argument}" in strings, name
