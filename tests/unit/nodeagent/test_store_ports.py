"""How engines that share KV or say what they evict are started, and on which nodes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas.reconcile import LackingParts, reconcile
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineCommand, EngineLaunch, StorePorts, UnknownOption
from nodeagent.drivers.vllm import EVENTS_SOCKET, STORE_CONFIG
from nodeagent.host.store_master import missing_master, store_master_program
from ops.engines.mooncake import CHANGES, Change
from tests.builders import GIB, a_spec
from tests.unit.nodeagent.test_decide import an_assignment

PORTS = StorePorts(master=9500, first=9501, last=9519)
SHARED = EngineSettings(driver="vllm", kv_memory_bytes=GIB, share_kv=True)
INSTALLED = {"vllm": "", "embedded": ""}
EMBEDDED = EngineSettings(driver="embedded", share_kv=True, options={"kv_store_bytes": "1000000"})


def started(engine: EngineSettings = SHARED, **fields: Any) -> EngineCommand:
    values = {"port": 4321, "host": "10.0.0.7", "store_ports": PORTS, **fields}
    spec = a_spec("r1", engine=engine, device_ids=(DeviceId("cpu"),))
    folder, model = Path("/run/r1"), Path("/models/x")
    launch = EngineLaunch(spec=spec, model_path=model, folder=folder, threads=2, **values)
    return DRIVERS[engine.driver].command(launch)


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


def test_the_embedded_engine_joins_the_store_if_it_is_told_how_much_memory_to_give() -> None:
    config = json.loads(started(EMBEDDED).files["config.json"])
    place = {"master_port": 9500, "host": "10.0.0.7", "first_port": 9501, "last_port": 9519}
    assert (config["kv_store"], config["kv_store_bytes"]) == (place, 1_000_000)
    assert read_config_of(started(EMBEDDED)).kv_store is not None
    alone = msgspec.structs.replace(EMBEDDED, options={})
    config = json.loads(started(alone, store_ports=None).files["config.json"])
    assert (config["kv_store"], config["kv_store_bytes"]) == (None, 0)
    with pytest.raises(UnknownOption, match="plaintext_kv_store_ports is not set"):
        started(EMBEDDED, store_ports=None)


def read_config_of(command: EngineCommand) -> EngineConfig:
    return msgspec.json.decode(command.files["config.json"], type=EngineConfig)


def test_an_engine_that_cannot_say_what_it_evicts_publishes_no_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = EngineSettings(driver="vllm", kv_memory_bytes=GIB)
    version = "0.31.2"
    monkeypatch.setattr(
        "nodeagent.drivers.installed_version.problem",
        lambda program, versions: versions.problem(version),
    )
    assert started(alone).kv_events == ""
    version = "0.32.0"
    command = started(alone)
    assert command.kv_events == f"/run/r1/{EVENTS_SOCKET}"
    given = json.loads(command.arguments[command.arguments.index("--kv-events-config") + 1])
    assert (given["publisher"], given["endpoint"]) == ("zmq", f"ipc://{command.kv_events}")
    connected = msgspec.structs.replace(alone, options={"kv_connector": "nixl"})
    assert started(connected).kv_events == command.kv_events
    # In the store, and in other tiers, what was evicted is still found.
    assert started(SHARED).kv_events == ""
    for name, value in (
        ("kv_events_config", "{}"),
        ("kv_offloading_size", "4"),
        ("kv_transfer_config", "{}"),
        ("enable_prefix_caching", "false"),
        ("data_parallel_size", "2"),
    ):
        changed = msgspec.structs.replace(alone, options={name: value})
        assert started(changed).kv_events == "", name


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
        (EMBEDDED, True),
    ],
)
def test_a_node_that_lacks_the_store_refuses_what_needs_it(
    engine: EngineSettings, *, refused: bool
) -> None:
    lacking = LackingParts(INSTALLED, store="no ports")
    assert reasons(engine, lacking) == (["cannot run r1: no ports"] if refused else [])


def test_a_node_whose_engine_cannot_join_a_store_refuses_that_engine_alone() -> None:
    lacking = LackingParts(INSTALLED, store_client={"embedded": "no mooncake"})
    assert reasons(EMBEDDED, lacking) == ["cannot run r1: no mooncake"]
    assert reasons(SHARED, lacking) == []


def reasons(engine: EngineSettings, lacking: LackingParts) -> list[str]:
    """Return why a node that lacks these refuses a replica."""
    spec = a_spec("r1", engine=engine, device_ids=(DeviceId("cpu"),))
    assignment = msgspec.structs.replace(an_assignment(), replicas=(spec,))
    steps = reconcile(assignment, {}, {DeviceId("cpu"): 0}, lacking)
    return [refusal.reason for refusal in steps.refusals]


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ((9510, 9500), "first port must not be above"),
        ((9500, 9502), "give at least 4"),
        ((1000, 1031), "use ports from 1024 to 32767 or 61000 to 65535"),
        ((32_760, 32_780), "Mooncake would listen at others instead"),
        ((40_000, 40_031), "Mooncake would listen at others instead"),
    ],
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


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: Path(change.path).name)
def test_vllm_is_changed_once_and_only_in_the_version_that_is_tested(change: Change) -> None:
    changed = change.made_in(f"before\n{change.before}after\n")
    assert changed == f"before\n{change.after}after\n"
    assert change.made_in(changed) == changed
    with pytest.raises(ValueError, match="not that of the vLLM tested here"):
        change.made_in("another version\n")


def test_the_master_is_found_on_the_path_or_beside_the_agents_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path, beside = tmp_path / "path", tmp_path / "environment"
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr("sys.executable", str(beside / "python"))
    assert missing_master().startswith("mooncake_master is neither on the PATH of the agent nor")
    for folder in (beside, on_path):
        folder.mkdir()
        program = folder / "mooncake_master"
        program.touch(0o755)
        assert missing_master() == ""
        assert store_master_program() == str(program)
