"""vLLM's own argument parser takes every command line that our driver can write."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaGroup
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import DeviceMemory, EngineLaunch
from nodeagent.drivers.output_parsers import FORMATS, STRICT_PARSERS
from tests.builders import GIB, a_spec

ENGINES: Final = Path(os.environ.get("ISOCHRONE_ENGINES", Path(__file__).parents[2] / ".engines"))
PYTHON: Final = ENGINES / "vllm" / "bin" / "python"
OPTIONS: Final = ENGINE_OPTIONS["vllm"]
SCRIPT: Final = """
import json, sys
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # since 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
result = {
    # Not all are in `option_strings`: 0.33 keeps `--no-enable-NAME` and hides it from the help.
    "known": {name: [a.dest, a.nargs == 0] for name, a in parser._option_string_actions.items()},
    "parsed": [vars(parser.parse_args(line)) for line in json.load(sys.stdin)],
    "tool_parsers": ToolParserManager.list_registered(),
    "reasoning_parsers": ReasoningParserManager.list_registered(),
    "strict_parsers": [
        name
        for name in ToolParserManager.list_registered()
        if ToolParserManager.get_tool_parser(name).structural_tag_model
    ],
}
print(json.dumps(result, default=str))
"""
KV_TRANSFER: Final = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
KV_EVENTS: Final = {"enable_kv_cache_events": True, "endpoint": "ipc:///run/kv"}


def a_launch(group: ReplicaGroup | None = None, options: Mapping[str, str] = {}) -> EngineLaunch:
    """Return the inputs of a start on two GPUs of each node."""
    gpus = (DeviceId("gpu0"), DeviceId("gpu1"))
    engine = EngineSettings(
        driver="vllm", options=dict(options), kv_memory_bytes=8 * GIB, devices=2
    )
    return EngineLaunch(
        spec=a_spec(name="m", engine=engine, device_ids=gpus, group=group, memory_bytes=20 * GIB),
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
        memory=DeviceMemory(total_bytes=80 * GIB, free_bytes=70 * GIB),
    )


def arguments(group: ReplicaGroup | None, options: Mapping[str, str] = {}) -> list[str]:
    """Return the arguments that the driver gives to `vllm serve`."""
    return list(DRIVERS["vllm"].command(a_launch(group, options)).arguments[2:])


def parse(lines: list[list[str]]) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT], input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"no vLLM below {ENGINES}: run `make test-engines`, which installs it",
)
def test_vllm_takes_our_command_lines_and_has_our_options_and_parsers() -> None:
    place = ReplicaGroup(leader_id=ReplicaId("r1"), place=1, nodes=2, host="10.0.0.1", port=5000)
    flags = {name: "true" for name in OPTIONS.names if OPTIONS.is_flag(name)}
    configs = {"kv_transfer_config": json.dumps(KV_TRANSFER)}
    configs["kv_events_config"] = json.dumps(KV_EVENTS)
    lines = [arguments(None), arguments(place), arguments(None, flags)]
    lines += [arguments(None, dict.fromkeys(flags, "false")), arguments(None, configs)]
    result = parse(lines)
    alone, part, on, off, configured = result["parsed"]
    assert (alone["model_tag"], alone["served_model_name"]) == ("/models/x", ["m"])
    assert (alone["host"], alone["port"], alone["max_model_len"]) == ("127.0.0.1", 4321, 4096)
    assert (alone["tensor_parallel_size"], alone["scheduling_policy"]) == (2, "priority")
    assert alone["kv_cache_memory_bytes"] == 8 * GIB
    assert alone["gpu_memory_utilization"] == 0.25
    assert alone["enable_prompt_tokens_details"] is True
    assert (part["nnodes"], part["node_rank"], part["headless"]) == (2, 1, True)
    assert (part["pipeline_parallel_size"], part["master_addr"]) == (2, "10.0.0.1")
    assert all(on[name] is True for name in flags)
    assert not any(off[name] for name in flags)
    assert "MooncakeStoreConnector" in str(configured["kv_transfer_config"])
    assert "ipc:///run/kv" in str(configured["kv_events_config"])

    # The driver's own: they become a kv_transfer_config, and the store's configuration.
    for name in sorted(OPTIONS.names - {"kv_connector", "kv_store_bytes"}):
        argument = name.replace("_", "-")
        assert result["known"][f"--{argument}"] == [name, OPTIONS.is_flag(name)], name
        assert name not in OPTIONS.negatable or f"--no-{argument}" in result["known"], name

    for form in FORMATS:
        assert form.vllm.tools in {"", *result["tool_parsers"]}
        assert form.vllm.reasoning in {"", *result["reasoning_parsers"]}
    # 0.32 lacks some of those of 0.33.
    assert set(result["strict_parsers"]) == STRICT_PARSERS["vllm"] & {*result["tool_parsers"]}
