"""Which parsers for tool calls and reasoning an engine gets, from the model's chat template."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineLaunch
from nodeagent.drivers.output_parsers import (
    FORMATS,
    OutputParsers,
    output_parsers,
    with_parsers,
)
from tests.builders import a_spec

HERMES = "{% if tools %}<tool_call>{% endif %}"
QWEN3 = HERMES + "{% if add_generation_prompt and enable_thinking is false %}<think></think>"
R1 = (
    "<｜tool▁calls▁begin｜>```json{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
GLM_45 = "<tool_call>{function-name}\n<arg_key>{% if enable_thinking %}"
GLM_47 = "<tool_call>{function-name}<arg_key>{% if enable_thinking %}"
OLD_TURNS = HERMES + "{# strip <think> #}{% if add_generation_prompt %}<|im_start|>{% endif %}"


def a_folder(folder: Path, template: str, model_type: str = "llama", *, alone: bool = True) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if alone:
        (folder / "chat_template.jinja").write_text(template)
    else:
        text = json.dumps({"bos_token": {}, "chat_template": template})
        (folder / "tokenizer_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("template", "model_type", "vllm", "sglang"),
    [
        (HERMES, "llama", ("hermes", ""), ("qwen", "")),
        (QWEN3, "qwen3", ("hermes", "qwen3"), ("qwen", "qwen3")),
        (OLD_TURNS, "qwen3", ("hermes", ""), ("qwen", "")),
        (R1, "deepseek_v3", ("deepseek_v3", "deepseek_r1"), ("deepseekv3", "deepseek-r1")),
        (
            "<｜tool▁calls▁begin｜>{% if thinking %}",
            "deepseek_v3",
            ("deepseek_v31", "deepseek_v3"),
            ("deepseekv31", "deepseek-v3"),
        ),
        ("<seed:tool_call><function=<parameter=", "seed_oss", ("seed_oss", ""), ("", "")),
        ("<tool_call><function=a><parameter=b>", "qwen3", ("qwen3_coder", ""), ("qwen3_coder", "")),
        ("[TOOL_CALLS][ARGS][THINK]", "mistral", ("mistral", "mistral"), ("mistral", "mistral")),
        ("<|start_header_id|>ipython", "llama", ("llama3_json", ""), ("llama3", "")),
        (GLM_45, "glm4_moe", ("glm45", "glm45"), ("glm45", "glm45")),
        (GLM_47, "glm4_moe", ("glm45", "glm45"), ("glm47", "glm45")),
        (
            "<|tool_calls_section_begin|>{{ message.reasoning_content }}",
            "kimi_k2",
            ("kimi_k2", "kimi_k2"),
            ("kimi_k2", "kimi_k2"),
        ),
        # These have no chat template.
        ("", "kimi_k3", ("kimi_k3", "kimi_k3"), ("kimi_k3", "kimi_k3")),
        ("", "deepseek_v4", ("deepseek_v4", "deepseek_v4"), ("deepseekv4", "deepseek-v4")),
        ("", "deepseek_v32", ("deepseek_v32", "deepseek_v3"), ("deepseekv32", "deepseek-v3")),
        # vLLM does not use the template of V3.2-Exp.
        (
            "<｜tool▁calls▁begin｜>{% if thinking %}",
            "deepseek_v32",
            ("deepseek_v32", "deepseek_v3"),
            ("deepseekv31", "deepseek-v3"),
        ),
        ("", "gpt_oss", ("openai", "openai_gptoss"), ("gpt-oss", "gpt-oss")),
        ("{{ messages }}", "llama", ("", ""), ("", "")),
    ],
)
def test_the_chat_template_shows_the_parsers(
    tmp_path: Path,
    template: str,
    model_type: str,
    vllm: tuple[str, str],
    sglang: tuple[str, str],
) -> None:
    for alone in (True, False):
        folder = tmp_path / str(alone)
        folder.mkdir()
        a_folder(folder, template, model_type, alone=alone)
        for engine, expected in (("vllm", vllm), ("sglang", sglang)):
            found = output_parsers(engine, folder)
            assert (found.tools, found.reasoning) == expected


@pytest.mark.parametrize(
    ("template", "model_type", "parser"),
    [
        ("<tool_call><function=a><parameter=b>", "qwen3", "qwen3_coder"),
        (HERMES, "qwen3", "qwen3"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
        ("", "deepseek_v32", "deepseek_v32"),
        (R1, "deepseek_v3", "deepseekv3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3", "deepseekv3.1"),
        ("{{ messages }}", "llama", ""),
    ],
)
def test_tensorrt_llm_reads_the_calls_of_models_whose_parser_it_has(
    tmp_path: Path, template: str, model_type: str, parser: str
) -> None:
    """Without a parser they stay in the text of answers."""
    folder = a_folder(tmp_path, template, model_type)
    assert output_parsers("tensorrt_llm", folder) == OutputParsers(parser)


@pytest.mark.parametrize(
    ("version", "deepseek", "qwen"),
    [
        ("1.2.1", "deepseekv3", "qwen3"),
        ("1.3.0rc1", "", "qwen3"),
        ("1.3.0", "", "qwen3"),
        ("", "", "qwen3"),
    ],
)
def test_tensorrt_llm_gets_the_name_that_its_version_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, deepseek: str, qwen: str
) -> None:
    driver = DRIVERS["tensorrt_llm"]
    monkeypatch.setattr(driver, "version", lambda: version)
    for template, model_type, parser in ((R1, "deepseek_v3", deepseek), (HERMES, "qwen3", qwen)):
        launch = EngineLaunch(
            spec=a_spec(
                engine=EngineSettings(driver="tensorrt_llm"), device_ids=(DeviceId("gpu0"),)
            ),
            model_path=a_folder(tmp_path, template, model_type),
            folder=Path("/run/r1"),
            port=4321,
            threads=2,
        )
        arguments = driver.command(launch).arguments
        given = dict(pairwise(arguments)).get("--tool_parser", "")
        assert given == parser


@pytest.mark.parametrize("config", ["", "[]", '{"model_type":3}', '{"model_type"', "\xff"])
def test_a_folder_that_cannot_be_read_gets_no_parser(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    assert with_parsers("vllm", {}, tmp_path) == {}


def test_options_replace_and_remove_the_chosen_parsers(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, QWEN3)
    chosen = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    auto = {"enable_auto_tool_choice": "true"}
    assert with_parsers("vllm", {}, folder) == {**chosen, **auto}
    assert with_parsers("sglang", {}, folder) == {**chosen, "tool_call_parser": "qwen"}
    given = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    assert with_parsers("vllm", given, folder) == {"tool_call_parser": "mistral", **auto}
    off = {"enable_auto_tool_choice": "false", "seed": "1"}
    assert with_parsers("vllm", off, folder) == {**chosen, **off}
    removed = {"tool_call_parser": "none"}
    assert with_parsers("vllm", removed, folder) == {"reasoning_parser": "qwen3"}


def test_a_model_without_tools_can_be_made_to_call_one(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}")
    auto = {"enable_auto_tool_choice": "true"}
    assert with_parsers("vllm", {}, folder) == {"tool_call_parser": "hermes", **auto}
    assert with_parsers("vllm", {"tool_call_parser": "none"}, folder) == {}
    assert with_parsers("sglang", {}, folder) == {}


def test_tools_in_an_unknown_format_get_no_parser(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "{% if tools %}<<CALL>>{% endif %}{{ messages }}")
    assert with_parsers("vllm", {}, folder) == {}


def test_each_format_names_parsers_of_vllm() -> None:
    assert all(form.vllm.tools or form.vllm.reasoning for form in FORMATS)
    assert all(form.marks or form.model_type for form in FORMATS)
    for engine in ("vllm", "sglang"):
        assert {"tool_call_parser", "reasoning_parser"} <= ENGINE_OPTIONS[engine].names


def test_vllm_on_a_cpu_shares_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(device: str, **options: str) -> EngineLaunch:
        engine = EngineSettings(driver="vllm", options=options)
        return EngineLaunch(
            spec=a_spec(engine=engine, device_ids=(DeviceId(device),)),
            model_path=a_folder(tmp_path, QWEN3),
            folder=tmp_path,
            port=1,
            threads=6,
        )

    for name in (
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "KMP_BLOCKTIME",
        "VLLM_CPU_OMP_THREADS_BIND",
    ):
        monkeypatch.delenv(name, raising=False)
    driver = DRIVERS["vllm"]
    command = driver.command(launch("cpu", enable_lora="true"))
    line = " ".join(command.arguments)
    assert "--enable-auto-tool-choice --enable-lora --enforce-eager" in line
    assert "--scheduling-policy priority" in line
    assert "--reasoning-parser qwen3" in line
    assert "--tool-call-parser hermes" in line
    assert command.environment["OMP_NUM_THREADS"] == "6"
    assert command.environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    compiled = driver.command(launch("cpu", enforce_eager="false"))
    assert "--enforce-eager" not in compiled.arguments
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in driver.command(launch("cpu")).environment
    on_gpu = driver.command(launch("gpu0"))
    assert "--enforce-eager" not in on_gpu.arguments
    assert "OMP_NUM_THREADS" not in on_gpu.environment
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in on_gpu.environment
    assert not any(name.startswith("OTEL_") for name in on_gpu.environment)
    url = "http://10.1.0.9:4318/v1/traces"
    traced = driver.command(launch("gpu0", otlp_traces_endpoint=url))
    assert f"--otlp-traces-endpoint {url}" in " ".join(traced.arguments)
    assert traced.environment["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"
    assert traced.environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
