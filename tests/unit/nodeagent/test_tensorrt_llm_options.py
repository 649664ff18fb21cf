"""TensorRT-LLM's argument parser takes every command line that our driver can write.

The engine cannot be installed without a GPU. `tests/engines/tensorrt_llm_options.json` has the
options of its parser, from its public source.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineLaunch
from tests.builders import GIB, a_spec

DATA: Final = Path(__file__).parents[2] / "engines" / "tensorrt_llm_options.json"
BEFORE, CURRENT = json.loads(DATA.read_text())["parsers"]
OPTIONS: Final = ENGINE_OPTIONS["tensorrt_llm"]
TYPES: Final = {"int": int, "float": float, "str": str}
VALUES: Final[Mapping[str, str]] = {
    "backend": "pytorch",
    "kv_cache_free_gpu_memory_fraction": "0.8",
    "pp_size": "2",
    "reasoning_parser": "qwen3",
    "tool_parser": "qwen3",
}
"""The values of options that do not take any number."""


class Refused(Exception):
    """The parser does not take a command line."""


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def a_parser(version: Mapping[str, Any]) -> Parser:
    parser = Parser(allow_abbrev=False)
    parser.add_argument("model")
    for name, kind in version["values"].items():
        if isinstance(kind, list):
            parser.add_argument(f"--{name}", choices=kind)
        else:
            parser.add_argument(f"--{name}", type=TYPES[kind])
    for name in version["flags"]:
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def arguments(**options: str) -> tuple[str, ...]:
    gpus = (DeviceId("gpu0"), DeviceId("gpu1"))
    engine = EngineSettings(
        driver="tensorrt_llm", options=options, kv_memory_bytes=8 * GIB, devices=2
    )
    launch = EngineLaunch(
        spec=a_spec(engine=engine, device_ids=gpus, memory_bytes=20 * GIB, context_tokens=4096),
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
    )
    command = DRIVERS["tensorrt_llm"].command(launch).arguments
    assert command[:2] == ("trtllm-serve", "serve")
    return command[2:]


def test_it_takes_our_command_line() -> None:
    parsed = a_parser(CURRENT).parse_args(arguments())
    assert (parsed.model, parsed.host, parsed.port) == ("/models/x", "127.0.0.1", 4321)
    assert (parsed.max_seq_len, parsed.tp_size) == (4096, 2)
    assert parsed.extra_llm_api_options == "/run/r1/extra.yaml"


@pytest.mark.parametrize("name", sorted(OPTIONS.names - {"cache_transceiver_backend"}))
def test_it_has_each_of_our_options(name: str) -> None:
    value = "true" if OPTIONS.is_flag(name) else VALUES.get(name, "4")
    parsed = a_parser(CURRENT).parse_args(arguments(**{name: value}))
    assert str(getattr(parsed, name)).lower() == value


def test_versions_before_those_of_the_driver_lack_an_option() -> None:
    a_parser(BEFORE).parse_args(arguments())
    with pytest.raises(Refused, match="unrecognized arguments: --tool_parser"):
        a_parser(BEFORE).parse_args(arguments(tool_parser="qwen3"))


def test_an_option_of_the_wrong_kind_is_refused() -> None:
    """The parser of this test is as strict as the engine's."""
    with pytest.raises(Refused, match="invalid choice"):
        a_parser(CURRENT).parse_args(arguments(tool_parser="unknown"))
    with pytest.raises(Refused, match="invalid float value"):
        a_parser(CURRENT).parse_args(arguments(kv_cache_free_gpu_memory_fraction="many"))
