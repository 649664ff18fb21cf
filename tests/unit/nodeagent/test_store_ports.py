"""How a vLLM that shares KV is started, and on which nodes it can be."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas.reconcile import STORE_KEY, reconcile
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineCommand, EngineLaunch, StorePorts, UnknownOption
from nodeagent.drivers.vllm import STORE_CONFIG
from ops.engines.mooncake import CUDA_EVENT, NO_EVENT_ON_CPU, without_cuda_event
from tests.builders import GIB, a_spec
from tests.unit.nodeagent.test_decide import an_assignment

PORTS = StorePorts(master=9500, first=9501, last=9519)
SHARED = EngineSettings(driver="vllm", kv_memory_bytes=GIB, share_kv=True)


def started(engine: EngineSettings = SHARED, **fields: Any) -> EngineCommand:
    values = {"port": 4321, "host": "10.0.0.7", "store_ports": PORTS, **fields}
    spec = a_spec("r1", engine=engine, device_ids=(DeviceId("cpu"),))
    folder, model = Path("/run/r1"), Path("/models/x")
    launch = EngineLaunch(spec=spec, model_path=model, folder=folder, threads=2, **values)
    return DRIVERS["vllm"].command(launch)


def transfer_config(command: EngineCommand) -> dict[str, Any]:
    place = command.arguments.index("--kv-transfer-config")
    config: dict[str, Any] = json.loads(command.arguments[place + 1])
    return config


def test_vllm_finds_the_master_on_loopback_and_names_blocks_like_its_peers() -> None:
    command = started()
    config = transfer_config(command)
    assert (config["kv_connector"], config["kv_role"]) == ("MooncakeStoreConnector", "kv_both")
    assert config["kv_load_failure_policy"] == "recompute"
    extra = config["kv_connector_extra_config"]
    assert (extra["cache_prefix"], extra["lookup_async"]) == ("d-1", True)
    store = json.loads(command.files[STORE_CONFIG])
    assert store["master_server_address"] == "127.0.0.1:9500"
    assert (store["global_segment_size"], store["local_buffer_size"]) == (GIB, GIB // 8)
    environment = command.environment
    assert environment["MOONCAKE_CONFIG_PATH"] == f"/run/r1/{STORE_CONFIG}"
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] == "10.0.0.7"
    ranges = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
    assert [environment[name] for name in ranges] == ["9501", "9519"]


def test_engines_of_one_machine_look_up_through_sockets_of_their_own() -> None:
    ports = [
        transfer_config(started(port=port))["kv_connector_extra_config"]["lookup_rpc_port"]
        for port in (1, 2)
    ]
    assert ports == [1, 2]


def test_the_segment_is_what_the_deployment_says() -> None:
    engine = msgspec.structs.replace(SHARED, options={"kv_store_bytes": "1000000"})
    command = started(engine)
    assert json.loads(command.files[STORE_CONFIG])["global_segment_size"] == 1_000_000
    assert not [argument for argument in command.arguments if "store-bytes" in argument]


def test_without_sharing_nothing_of_the_store_is_set() -> None:
    command = started(msgspec.structs.replace(SHARED, share_kv=False), store_ports=None)
    assert "--kv-transfer-config" not in command.arguments
    assert (command.files, "MOONCAKE_CONFIG_PATH" in command.environment) == ({}, False)


def test_a_node_without_ports_for_a_store_starts_none() -> None:
    with pytest.raises(UnknownOption, match="plaintext_kv_store_ports is not set"):
        started(store_ports=None)


@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        (SHARED, True),
        (msgspec.structs.replace(SHARED, share_kv=False), False),
        (EngineSettings(driver="embedded", share_kv=True), False),
    ],
)
def test_a_node_that_lacks_the_store_refuses_what_needs_it(
    engine: EngineSettings, *, refused: bool
) -> None:
    spec = a_spec("r1", engine=engine, device_ids=(DeviceId("cpu"),))
    assignment = msgspec.structs.replace(an_assignment(), replicas=(spec,))
    missing = {"vllm": "", "embedded": "", STORE_KEY: "no ports"}
    steps = reconcile(assignment, {}, {DeviceId("cpu"): 0}, missing)
    reasons = [refusal.reason for refusal in steps.refusals]
    assert reasons == (["cannot run r1: no ports"] if refused else [])


@pytest.mark.parametrize(
    ("ports", "reason"),
    [((9510, 9500), "first port must not be above"), ((9500, 9502), "give at least 4")],
)
def test_a_range_of_ports_that_cannot_work_is_refused(ports: tuple[int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        NodeConfig(
            name="n1",
            schedulers=(),
            state=Path("/s"),
            address="http://10.0.0.7:1",
            plaintext_kv_store_ports=ports,
        )


def test_the_event_of_cuda_is_created_on_gpus_only() -> None:
    changed = without_cuda_event(f"before\n{CUDA_EVENT}after\n")
    assert changed == f"before\n{NO_EVENT_ON_CPU}after\n"
    assert without_cuda_event(changed) == changed
    with pytest.raises(ValueError, match="not that of the vLLM tested here"):
        without_cuda_event("another version\n")
