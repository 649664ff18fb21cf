"""The command that each driver builds, and how it reads its engine's statistics."""

import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaGroup
from nodeagent.drivers import DRIVERS, installed_version, missing_by_driver
from nodeagent.drivers import driver as driver_module
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import DeviceMemory, EngineLaunch, UnknownOption
from nodeagent.drivers.request_body import PLAIN, with_fields
from nodeagent.host.devices import DeviceReader, device_class
from nodeagent.host.processes import passed_environment
from tests.builders import GIB, a_spec


def a_launch(driver: str, **options: str) -> EngineLaunch:
    gpus = (DeviceId("gpu2"), DeviceId("gpu3"))
    devices = (DeviceId("cpu"),) if driver in ("embedded", "mock") else gpus
    engine = EngineSettings(driver=driver, options=options, kv_memory_bytes=1 << 20)
    return EngineLaunch(
        spec=a_spec(engine=engine, device_ids=devices),
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
    )


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("vllm", ["vllm serve /models/x", "--tensor-parallel-size 2", "--port 4321"]),
        ("sglang", ["-m sglang.launch_server", "--tp-size 2", "--enable-cache-report"]),
        ("tensorrt_llm", ["trtllm-serve serve /models/x", "--tp_size 2", "extra.yaml"]),
    ],
)
def test_an_external_engine_gets_its_flags_and_its_gpus(driver: str, expected: list[str]) -> None:
    command = DRIVERS[driver].command(a_launch(driver))
    line = " ".join(command.arguments)
    assert all(flags in line for flags in expected), line
    assert command.base_url == "http://127.0.0.1:4321"
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    # The devices are numbered as NVML does, also where not all are of one kind.
    assert command.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "--host 127.0.0.1" in line


def test_a_driver_reports_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DRIVERS["embedded"].missing() == DRIVERS["mock"].missing() == ""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(driver_module, "find_spec", lambda _: None)
    assert {name: driver.missing() for name, driver in DRIVERS.items()} == {
        "embedded": "torch is not installed in the agent's environment",
        "mock": "",
        "vllm": "vllm is not on the PATH of the agent",
        "llama_cpp": "llama-server is not on the PATH of the agent",
        "sglang": "sglang is not installed in the agent's environment",
        "tensorrt_llm": "trtllm-serve is not on the PATH of the agent",
        "command": "",
    }
    assert missing_by_driver({})["command"] == "this node has no [commands]"
    assert not missing_by_driver({"own": ConfiguredCommand(arguments=("x", "{port}"))})["command"]


def test_a_cache_salt_from_the_client_is_replaced() -> None:
    """With another tenant's salt, `cached_tokens` would reveal that tenant's prompts."""
    body = (
        b'{"cache_salt":"b","model":"m", "stream":true,"cache_salt":null,"messages":[{"a":1.50}]}'
    )
    salted = with_fields(body, {"cache_salt": 'a"b'})
    assert msgspec.json.decode(salted) == {**msgspec.json.decode(body), "cache_salt": 'a"b'}
    assert salted.count(b"cache_salt") == 1
    assert b"1.50" in salted, "other fields are unchanged"
    with pytest.raises(ApiError, match="Expected `object`"):
        with_fields(b'["no object"]', {})
    for driver, paths in (
        ("vllm", 2),
        ("llama_cpp", 2),
        ("sglang", 2),
        ("tensorrt_llm", 1),
        ("embedded", 0),
    ):
        assert len(DRIVERS[driver].salted_paths) == paths


@pytest.mark.parametrize(
    ("choice", "given", "strict"),
    [
        ("required", {}, True),
        ({"type": "function", "function": {"name": "f"}}, {}, True),
        ("required", {"strict": None}, True),
        ("required", {"strict": False}, False),
        ("auto", {}, None),
        (None, {}, None),
    ],
)
def test_vllm_follows_the_schema_of_a_call_that_it_must_make(
    choice: object, given: dict[str, object], strict: bool | None
) -> None:
    """Without `strict`, most of its parsers hold such a call to the tool's name only."""
    command = DRIVERS["vllm"].command(a_launch("vllm"))
    function = {"name": "f", "parameters": {"type": "object"}, **given}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    sent = with_fields(msgspec.json.encode(body), {}, command)
    (tool,) = msgspec.json.decode(sent)["tools"]
    assert tool["function"] == function | ({} if strict is None else {"strict": strict})


@pytest.mark.parametrize(
    ("driver", "parser", "may_be_strict"),
    [
        *(("vllm", parser, True) for parser in ("hermes", "llama3_json", "qwen3_coder")),
        *(("vllm", parser, False) for parser in ("mistral", "pythonic", "seed_oss")),
        *(("sglang", parser, True) for parser in ("qwen25", "mistral")),
        *(("sglang", parser, False) for parser in ("glm45", "minimax-m2", "pythonic")),
    ],
)
def test_a_strict_function_is_refused_where_the_parser_does_not_hold_its_calls(
    driver: str, parser: str, may_be_strict: bool
) -> None:
    command = DRIVERS[driver].command(a_launch(driver, tool_call_parser=parser))
    assert command.may_be_strict is may_be_strict
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]

    def send(**fields: object) -> bytes:
        body = msgspec.json.encode({"tools": tools, **fields})
        return with_fields(body, {}, command)

    # A call that must be made follows the schema with every parser.
    for fields in ({"tool_choice": "required"}, {"tool_choice": "none"}):
        assert b"strict" in send(**fields)
    for fields in ({}, {"tool_choice": "auto"}):
        if may_be_strict:
            assert b"strict" in send(**fields)
        else:
            with pytest.raises(ApiError, match="'strict'") as refused:
                send(**fields)
            assert refused.value.param == "tools"


@pytest.mark.parametrize("tools", ["null", "3", '[1,{},{"function":7}]'])
def test_tools_that_cannot_be_marked_are_left_to_the_engine(tools: str) -> None:
    body = f'{{"tool_choice":"required","tools":{tools}}}'.encode()
    command = msgspec.structs.replace(PLAIN, strict_forced_tools=True, may_be_strict=False)
    assert with_fields(body, {}, command) == body
    body = f'{{"tools":{tools}}}'.encode()
    assert with_fields(body, {}, command) == body


def test_an_unknown_option_is_refused() -> None:
    command = DRIVERS["vllm"].command(a_launch("vllm", kv_cache_dtype="fp8", enforce_eager=""))
    line = " ".join(command.arguments)
    assert "--enforce-eager --kv-cache-dtype fp8" in line
    for driver in DRIVERS:
        with pytest.raises(UnknownOption, match="unknown option 'trust_remote_code'"):
            DRIVERS[driver].command(a_launch(driver, trust_remote_code="true"))


def test_the_drivers_are_those_whose_options_the_scheduler_knows() -> None:
    assert DRIVERS.keys() == ENGINE_OPTIONS.keys()


@pytest.mark.parametrize(
    ("driver", "option", "value", "expected", "absent"),
    [
        ("vllm", "enforce_eager", "true", "--enforce-eager", "true"),
        ("vllm", "enforce_eager", "", "--enforce-eager", "true"),
        ("vllm", "enforce_eager", "false", "", "eager"),
        ("vllm", "enable_prefix_caching", "false", "--no-enable-prefix-caching", "false"),
        ("vllm", "enable_lora", "true", "--enable-lora", "true"),
        ("vllm", "enable_expert_parallel", "true", "--enable-expert-parallel", "true"),
        ("vllm", "enable_sleep_mode", "true", "--enable-sleep-mode", "true"),
        ("sglang", "disable_cuda_graph", "True", "--disable-cuda-graph", "True"),
        ("sglang", "disable_cuda_graph", "false", "", "cuda"),
        ("tensorrt_llm", "enable_chunked_prefill", "true", "--enable_chunked_prefill", "true"),
        ("tensorrt_llm", "enable_chunked_prefill", "false", "", "chunked"),
        # A prompt may be longer than a step.
        ("tensorrt_llm", "max_num_tokens", "512", "--enable_chunked_prefill", "true"),
    ],
)
def test_a_flag_is_given_without_a_value(
    driver: str, option: str, value: str, expected: str, absent: str
) -> None:
    arguments = DRIVERS[driver].command(a_launch(driver, **{option: value})).arguments
    assert not expected or expected in arguments
    others = [one for one in arguments if one != expected and not one.startswith("{")]
    assert not any(absent in argument for argument in others)


def with_memory(
    driver: str, kv_bytes: int, memory_bytes: int = 0, options: Mapping[str, str] = {}
) -> EngineLaunch:
    """A replica on a device of 80 GiB, half of which other replicas use; 16 GiB are planned."""
    launch = a_launch(driver, **dict(options))
    engine = msgspec.structs.replace(
        launch.spec.engine, kv_memory_bytes=kv_bytes, memory_bytes=memory_bytes, devices=2
    )
    spec = msgspec.structs.replace(launch.spec, engine=engine, memory_bytes=16 * GIB)
    memory = DeviceMemory(total_bytes=80 * GIB, free_bytes=40 * GIB)
    return msgspec.structs.replace(launch, spec=spec, memory=memory)


@pytest.mark.parametrize(
    ("driver", "kv_bytes", "memory_bytes", "expected"),
    [
        (
            "vllm",
            4 * GIB,
            0,
            f"--gpu-memory-utilization 0.2000 --kv-cache-memory-bytes {4 * GIB}",
        ),
        ("vllm", 0, 16 * GIB, "--gpu-memory-utilization 0.2000"),
        # 4 GiB, or 90 % of 16 GiB, of the 40 GiB that are free.
        ("sglang", 4 * GIB, 0, "--mem-fraction-static 0.1000"),
        ("sglang", 0, 16 * GIB, "--mem-fraction-static 0.3600"),
        ("tensorrt_llm", 4 * GIB, 0, f"max_gpu_total_bytes: {4 * GIB}\n"),
        ("tensorrt_llm", 0, 16 * GIB, f"max_gpu_total_bytes: {int(0.9 * 16 * GIB) - 3}\n"),
    ],
)
def test_an_engine_is_kept_within_its_planned_memory(
    driver: str, kv_bytes: int, memory_bytes: int, expected: str
) -> None:
    command = DRIVERS[driver].command(with_memory(driver, kv_bytes, memory_bytes))
    files = b"".join(command.files.values()).decode()
    assert expected in " ".join(command.arguments) + files


@pytest.mark.parametrize(
    ("driver", "option", "expected"),
    [
        ("vllm", "gpu_memory_utilization", "--gpu-memory-utilization 0.5"),
        ("sglang", "mem_fraction_static", "--mem-fraction-static 0.5"),
        (
            "tensorrt_llm",
            "kv_cache_free_gpu_memory_fraction",
            "--kv_cache_free_gpu_memory_fraction 0.5",
        ),
    ],
)
def test_an_option_for_memory_replaces_the_planned_one(
    driver: str, option: str, expected: str
) -> None:
    command = DRIVERS[driver].command(with_memory(driver, 4 * GIB, options={option: "0.5"}))
    line = " ".join(command.arguments)
    assert expected in line
    assert "kv-cache-memory-bytes" not in line
    assert line.count(option.replace("_", "-")) <= 1
    assert b"max_gpu" not in b"".join(command.files.values())


def test_engines_get_the_variables_that_they_read_and_no_secret() -> None:
    read = {"VLLM_CPU_KVCACHE_SPACE": "1", "KMP_BLOCKTIME": "0", "UCX_TLS": "tcp", "PATH": "/bin"}
    kept_back = {"HF_TOKEN": "s", "VLLM_API_KEY": "s", "AWS_REGION": "x", "ISOCHRONE_KEY": "s"}
    assert passed_environment({**read, **kept_back}) == read


def test_a_program_that_cannot_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    # The first line of a script cannot name a path with a space, which the checkout's may have.
    interpreter = tmp_path / "python3"
    interpreter.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def reason(text: str) -> str:
        program.write_text(text)
        program.chmod(0o755)
        versions = installed_version.VersionRange(first=(0, 11), before=(1, 0))
        return installed_version.problem("vllm", versions)

    assert "No such file" in reason("#!/nowhere/python3\n")
    assert "No package metadata was found for vllm" in reason(f"#!{interpreter}\n")
    assert reason("#!/bin/sh\nexec elsewhere\n") == "", "an operator's wrapper is not examined"
    monkeypatch.setattr(installed_version, "_version", lambda *_: "0.10.2")
    assert "0.10.2" in reason("")
    assert "install version 0.11 or later" in reason("")
    monkeypatch.setattr(installed_version, "_version", lambda *_: "1.0.1")
    assert "install a version from 0.11 to below 1.0" in reason("")
    monkeypatch.setattr(installed_version, "_version", lambda *_: "0.32.0+cpu")
    assert reason("") == ""


def test_the_embedded_engine_gets_a_valid_config() -> None:
    tiers = {"kv_host_bytes": "4096", "kv_file_bytes": "8192", "kv_folder": "/kept"}
    command = DRIVERS["embedded"].command(a_launch("embedded", batch_tokens_max="64", **tiers))
    config = msgspec.json.decode(command.files["config.json"], type=EngineConfig)
    assert (config.device, config.dtype, config.batch_tokens_max) == ("cpu", "fp32", 64)
    assert (config.kv_host_bytes, config.kv_file_bytes, config.kv_folder) == (4096, 8192, "/kept")
    assert config.socket == command.socket == "/run/r1/engine.sock"
    assert not config.sleeps
    launch = a_launch("embedded")
    launch = msgspec.structs.replace(
        launch, spec=msgspec.structs.replace(launch.spec, overcommit=4.0)
    )
    files = DRIVERS["embedded"].command(launch).files
    assert msgspec.json.decode(files["config.json"], type=EngineConfig).sleeps
    with pytest.raises(UnknownOption, match="batch_tokens_max"):
        DRIVERS["embedded"].command(a_launch("embedded", batch_tokens_max="many"))


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({}, (2, 1)),
        ({"pipeline_parallel": "2"}, (1, 2)),
        ({"tensor_parallel": "2", "expert_parallel": "2"}, (2, 1)),
        ({"tensor_parallel": "4"}, None),
        ({"pipeline_parallel": "3"}, None),
    ],
)
def test_the_embedded_engine_uses_all_gpus_of_the_replica(
    options: dict[str, str], split: tuple[int, int] | None
) -> None:
    launch = a_launch("embedded", **options)
    gpus = msgspec.structs.replace(launch.spec, device_ids=(DeviceId("gpu2"), DeviceId("gpu3")))
    launch = msgspec.structs.replace(launch, spec=gpus)
    if split is None:
        with pytest.raises(
            UnknownOption, match=r"on 2 devices: .* must equal the number of devices"
        ):
            DRIVERS["embedded"].command(launch)
        return
    command = DRIVERS["embedded"].command(launch)
    config = msgspec.json.decode(command.files["config.json"], type=EngineConfig)
    assert (config.tensor_parallel, config.pipeline_parallel) == split
    assert config.device == "cuda:0"
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("driver", "options", "expected"),
    [
        ("vllm", {"data_parallel_size": "2"}, "--tensor-parallel-size 1"),
        ("vllm", {"pipeline_parallel_size": "2"}, "--tensor-parallel-size 1"),
        ("tensorrt_llm", {"pp_size": "2"}, "--tp_size 1"),
        ("tensorrt_llm", {"pp_size": "1"}, "--tp_size 2"),
    ],
)
def test_copies_and_stages_share_the_gpus_of_the_replica(
    driver: str, options: dict[str, str], expected: str
) -> None:
    """Each part was split over all of them, and the engine looked for twice as many."""
    (name,) = options
    line = " ".join(DRIVERS[driver].command(a_launch(driver, **options)).arguments)
    assert expected in line
    with pytest.raises(UnknownOption, match=f"cannot use .*{name} 3"):
        DRIVERS[driver].command(a_launch(driver, **{name: "3"}))


def over_two_nodes(driver: str, place: int, **options: str) -> EngineLaunch:
    launch = a_launch(driver, **options)
    group = ReplicaGroup(
        leader_id=launch.spec.replica_id, place=place, nodes=2, host="10.0.0.7", port=9400
    )
    return msgspec.structs.replace(launch, spec=msgspec.structs.replace(launch.spec, group=group))


def test_vllm_over_nodes_gets_the_leaders_address_and_one_http_server() -> None:
    lines = []
    for place in (0, 1):
        command = DRIVERS["vllm"].command(over_two_nodes("vllm", place))
        assert command.base_url == ("http://127.0.0.1:4321" if place == 0 else "")
        lines.append(" ".join(command.arguments))
    rendezvous = "--nnodes 2 --node-rank {} --master-addr 10.0.0.7 --master-port 9400"
    assert all(rendezvous.format(place) in line for place, line in enumerate(lines))
    split = "--tensor-parallel-size 2 --pipeline-parallel-size 2 --distributed-executor-backend mp"
    assert all(split in line for line in lines)
    assert ["--headless" in line for line in lines] == [False, True]
    assert ["--port 4321" in line for line in lines] == [True, False]


def test_sglang_over_nodes_gets_the_leaders_address() -> None:
    for place in (0, 1):
        line = " ".join(DRIVERS["sglang"].command(over_two_nodes("sglang", place)).arguments)
        assert f"--nnodes 2 --node-rank {place} --dist-init-addr 10.0.0.7:9400" in line
        assert "--tp-size 4" in line


@pytest.mark.parametrize(
    ("driver", "options", "words"),
    [
        ("tensorrt_llm", {}, "over 2 nodes: mpirun or srun must start its ranks"),
        ("mock", {}, "over 2 nodes: the mock runs on one node"),
        ("vllm", {"pipeline_parallel_size": "1"}, "be a multiple of the number of nodes"),
        ("vllm", {"pipeline_parallel_size": "many"}, "a whole number above 0"),
        ("embedded", {"pipeline_parallel": "3"}, "with whole stages on each"),
    ],
)
def test_a_replica_that_cannot_span_nodes_is_refused_before_it_starts(
    driver: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(UnknownOption, match=words):
        DRIVERS[driver].command(over_two_nodes(driver, 0, **options))


def test_the_embedded_engine_runs_one_stage_per_node() -> None:
    launch = over_two_nodes("embedded", 1)
    command = DRIVERS["embedded"].command(launch)
    config = msgspec.json.decode(command.files["config.json"], type=EngineConfig)
    assert (config.tensor_parallel, config.pipeline_parallel) == (1, 2)
    assert config.group == launch.spec.group
    assert (command.base_url, command.socket) == ("", "/run/r1/engine.sock")
    gpus = msgspec.structs.replace(launch.spec, device_ids=(DeviceId("gpu0"), DeviceId("gpu1")))
    command = DRIVERS["embedded"].command(msgspec.structs.replace(launch, spec=gpus))
    config = msgspec.json.decode(command.files["config.json"], type=EngineConfig)
    assert (config.tensor_parallel, config.pipeline_parallel, config.device) == (2, 2, "cuda:0")


def test_vllm_statistics_are_read_from_its_metrics() -> None:
    body = b"""# HELP x
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:generation_tokens_total{model_name="m"} 120.0
vllm:prefix_cache_hits_total{model_name="m"} 512.0
vllm:external_prefix_cache_hits_total{model_name="m"} 128.0
not a line
"""
    stats = DRIVERS["vllm"].read_stats(body)
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (3, 2, 250)
    assert (stats.tokens_out_total, stats.prefix_hit_tokens_total) == (120, 640)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_metric_that_is_not_finite_is_ignored(value: str) -> None:
    body = f"vllm:num_requests_running 3\nvllm:kv_cache_usage_perc {value}\n".encode()
    stats = DRIVERS["vllm"].read_stats(body)
    assert (stats.running, stats.kv_blocks_used) == (3, 0)


@pytest.mark.parametrize(
    ("driver", "metric", "values"),
    [
        ("vllm", "vllm:iteration_tokens_total_count", (400, 464)),
        ("sglang", "sglang:num_used_tokens", (400, 464)),
    ],
)
def test_the_step_counter_moves_during_a_long_answer(
    driver: str, metric: str, values: tuple[float, float]
) -> None:
    before, later = (DRIVERS[driver].read_stats(f"{metric} {n}\n".encode()) for n in values)
    assert before.steps_total != later.steps_total


@pytest.mark.parametrize("name", ["request_success_total", "trtllm_request_success_total"])
def test_the_requests_that_tensorrt_llm_has_answered_are_its_steps(name: str) -> None:
    """1.2 has the name without a prefix."""
    page = f'{name}{{finished_reason="stop"}} 3.0\n{name}{{finished_reason="length"}} 1.0\n'
    assert DRIVERS["tensorrt_llm"].read_stats(page.encode()).steps_total == 4


@pytest.mark.parametrize(
    ("name", "memory_gb", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85.5, "h100-86g"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "a100-sxm4-40gb-42g"),
        ("NVIDIA GeForce RTX 4090", 25.8, "4090-26g"),
        ("Tesla T4", 16.1, "t4-16g"),
    ],
)
def test_a_device_class_combines_model_and_memory(
    name: str, memory_gb: float, expected: str
) -> None:
    assert device_class(name, int(memory_gb * 1e9)) == expected


class FakeNvml:
    """The NVML calls that the agent uses, for a machine without a GPU."""

    class NVMLError(Exception):
        """The error that NVML raises."""

    def __init__(self) -> None:
        self.gpus = [0, 1]
        self.lost: set[int] = set()

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        class Memory:
            total = 85_000_000_000
            free = 80_000_000_000

        return Memory()


def test_a_gpu_that_disappears_is_reported_as_unhealthy() -> None:
    nvml = FakeNvml()
    devices = DeviceReader(0, open_nvml=lambda: nvml)
    assert [d.device_id for d in devices.read()] == ["gpu0", "gpu1"]
    nvml.gpus = [0]
    after = {str(d.device_id): d for d in devices.read()}
    assert after["gpu0"].healthy
    assert not after["gpu1"].healthy
    assert "NVML" in after["gpu1"].reason
    assert not {str(d.device_id): d for d in devices.read()}["gpu1"].healthy


def test_a_gpu_that_falls_off_the_bus_leaves_the_others_healthy() -> None:
    nvml = FakeNvml()
    devices = DeviceReader(0, open_nvml=lambda: nvml)
    devices.read()
    nvml.lost = {0}
    after = {str(d.device_id): d for d in devices.read()}
    assert (after["gpu0"].healthy, after["gpu1"].healthy) == (False, True)
    assert after["gpu0"].reason == "NVML failed: GPU is lost"
    nvml.lost = set()
    assert all(device.healthy for device in devices.read())


def test_an_engine_is_told_the_memory_of_its_gpus() -> None:
    devices = DeviceReader(0, open_nvml=FakeNvml)
    expected = DeviceMemory(total_bytes=85_000_000_000, free_bytes=80_000_000_000)
    assert devices.memory([DeviceId("gpu0"), DeviceId("gpu1")]) == expected
    assert devices.memory([]) is None
    on_cpu = DeviceReader(0, open_nvml=lambda: None).memory([DeviceId("cpu")])
    assert on_cpu is not None
    assert 0 < on_cpu.free_bytes < on_cpu.total_bytes


def test_an_agent_without_descriptors_reads_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    devices = DeviceReader(0, open_nvml=lambda: nvml)

    def fail(index: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", fail)
    assert devices.memory([DeviceId("gpu0")]) is None
    assert devices.used_by(os.getpid(), [DeviceId("gpu0")]) == 0


def test_without_a_gpu_the_cpu_is_the_only_device() -> None:
    (cpu,) = DeviceReader(1 << 30, open_nvml=lambda: None).read()
    assert (cpu.device_id, cpu.device_class, cpu.memory_bytes) == ("cpu", "cpu", 1 << 30)
