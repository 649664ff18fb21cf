"""What differs with vLLM on a CPU: it cannot sleep, and its pipeline fails at the first request."""

from pathlib import Path

import msgspec
import pytest

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaGroup
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineLaunch, UnknownOption
from tests.builders import a_spec


def a_launch(device: str, overcommit: float = 1.0, **options: str) -> EngineLaunch:
    engine = EngineSettings(driver="vllm", options=options)
    devices = (DeviceId(device),)
    spec = a_spec(engine=engine, device_ids=devices, overcommit=overcommit)
    folder = Path("/run/r1")
    return EngineLaunch(spec=spec, model_path=folder, folder=folder, port=1, threads=2)


def over_two_nodes(launch: EngineLaunch) -> EngineLaunch:
    leader = launch.spec.replica_id
    group = ReplicaGroup(leader_id=leader, place=0, nodes=2, host="10.0.0.7", port=9400)
    return msgspec.structs.replace(launch, spec=msgspec.structs.replace(launch.spec, group=group))


def test_it_cannot_sleep() -> None:
    """Its sleep mode answers 200 there, and frees nothing."""
    with pytest.raises(UnknownOption, match="frees no memory"):
        DRIVERS["vllm"].command(a_launch("cpu", 4.0, enable_sleep_mode="true"))
    command = DRIVERS["vllm"].command(a_launch("gpu0", 4.0, enable_sleep_mode="true"))
    assert "--enable-sleep-mode" in command.arguments


def test_heads_are_split_over_nodes() -> None:
    for device, split in (
        ("cpu", "--tensor-parallel-size 2 --pipeline-parallel-size 1"),
        ("gpu0", "--tensor-parallel-size 1 --pipeline-parallel-size 2"),
    ):
        command = DRIVERS["vllm"].command(over_two_nodes(a_launch(device)))
        assert split in " ".join(command.arguments)
    with pytest.raises(UnknownOption, match="pipeline_parallel_size 2 on a CPU"):
        DRIVERS["vllm"].command(over_two_nodes(a_launch("cpu", pipeline_parallel_size="2")))


def test_nothing_is_compiled_while_it_serves() -> None:
    """The first log probabilities took 23 s, and without a compiler the engine core died."""
    compiled = a_launch("cpu", enforce_eager="false")
    for launch, is_off in ((a_launch("cpu"), True), (compiled, False), (a_launch("gpu0"), False)):
        environment = DRIVERS["vllm"].command(launch).environment
        assert ("TORCH_COMPILE_DISABLE" in environment) is is_off
