"""SGLang's own argument parser takes every command line that our driver can write."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaGroup, Role
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import DeviceMemory, EngineLaunch
from nodeagent.drivers.output_parsers import FORMATS, STRICT_PARSERS
from ops.engines.vendor_fields import DATA, read
from tests.builders import GIB, a_spec
from tests.engines.real_engines import ENGINES

PYTHON: Final = ENGINES / "vllm" / "bin" / "python"
SGLANG: Final = ENGINES / "sglang"
OPTIONS: Final = ENGINE_OPTIONS["sglang"]
SCRIPT: Final = """
import argparse, json, sys
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.server_args import ServerArgs

def is_strict(name, parser):
    # This one needs what the server reads from the model's folder.
    return name != "response_template" and parser().supports_structural_tag()

parsers = FunctionCallParser.ToolCallParserEnum
strict = [name for name, parser in parsers.items() if is_strict(name, parser)]
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
known = {a.dest: [a.nargs == 0, a.option_strings, list(a.choices or [])] for a in parser._actions}
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
print(json.dumps({"known": known, "parsed": parsed, "strict": strict}, default=str))
"""

pytestmark = pytest.mark.skipif(
    not (SGLANG / ".complete").exists(),
    reason=f"no SGLang below {ENGINES}: run `python -m ops.engines.sglang_parser`",
)


def arguments(
    group: ReplicaGroup | None, role: Role = Role.UNIFIED, **options: str
) -> tuple[str, ...]:
    """Return the arguments that the driver gives to SGLang's launcher."""
    gpus = (DeviceId("gpu0"), DeviceId("gpu1"))
    engine = EngineSettings(driver="sglang", options=options, kv_memory_bytes=8 * GIB, devices=2)
    spec = a_spec(name="m", engine=engine, device_ids=gpus, group=group, memory_bytes=20 * GIB)
    launch = EngineLaunch(
        spec=msgspec.structs.replace(spec, role=role),
        host="10.0.0.7",
        transfer_port=4322,
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
        memory=DeviceMemory(total_bytes=80 * GIB, free_bytes=70 * GIB),
    )
    command = DRIVERS["sglang"].command(launch).arguments
    return command[command.index("sglang.launch_server") + 1 :]


def parse(lines: list[tuple[str, ...]]) -> dict[str, Any]:
    paths = {"PYTHONPATH": str(SGLANG), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT],
        input=json.dumps(lines),
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_sglang_takes_our_command_lines_and_has_our_options() -> None:
    place = ReplicaGroup(leader_id=ReplicaId("r1"), place=1, nodes=2, host="10.0.0.1", port=5000)
    lines = [arguments(None), arguments(place)]
    lines += [arguments(None, Role.UNIFIED, **{flag: "true"}) for flag in sorted(OPTIONS.flags)]
    for role in (Role.PREFILL, Role.DECODE):
        lines.append(arguments(None, role, disaggregation_transfer_backend="mooncake"))
    result = parse(lines)
    alone, part = result["parsed"][:2]
    prefill, decode = result["parsed"][-2:]
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    assert (prefill["disaggregation_bootstrap_port"], prefill["host"]) == (4322, "10.0.0.7")
    assert prefill["disaggregation_transfer_backend"] == "mooncake"
    assert (len(prefill["api_key"]), decode["api_key"], decode["host"]) == (32, None, "127.0.0.1")
    assert (alone["tp_size"], alone["served_model_name"], alone["enable_metrics"]) == (2, "m", True)
    assert 0.1 < alone["mem_fraction_static"] < 0.2
    assert (part["nnodes"], part["node_rank"], part["tp_size"]) == (2, 1, 4)
    assert part["dist_init_addr"] == "10.0.0.1:5000"
    known = result["known"]
    for name in sorted(OPTIONS.names):
        is_flag, strings, _ = known.get(name, (None, [], []))
        assert f"--{name.replace('_', '-')}" in strings, name
        assert is_flag == OPTIONS.is_flag(name), name
    for option, names in (
        ("tool_call_parser", {form.sglang.tools for form in FORMATS}),
        ("reasoning_parser", {form.sglang.reasoning for form in FORMATS}),
    ):
        choices = known[option][2]
        assert not choices or names - {""} <= set(choices), option
    assert set(result["strict"]) == STRICT_PARSERS["sglang"]


def test_the_fields_of_its_requests_and_answers_are_those_of_our_description() -> None:
    """vendor_server.py, which takes its place in other tests, is made from it."""
    described = json.loads(DATA.read_text())["sglang"]
    assert read("sglang", SGLANG, described["metrics_read"]) == described["generated"]
