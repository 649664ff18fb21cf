"""The fields of both legs of a request, for each vendor's protocol."""

import json
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.engine_capabilities import ENGINE_CAPABILITIES
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import DeviceId, NodeId, ReplicaId
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS, KvAddress
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Role
from nodeagent.decide.requests.prefill_leg import (
    ONLY_READER_TIMEOUT_S,
    LegChoice,
    WaitingPromptSize,
    order_all,
)
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import EngineCommand, EngineLaunch
from nodeagent.drivers.handshake import (
    Handshake,
    HandshakeFailed,
    MooncakeHandshake,
    NixlHandshake,
    SglangHandshake,
    TensorRtLlmHandshake,
    cached_tokens,
    decode_fields,
)
from tests.builders import a_spec

TRANSFER = "f" * 32
ADDRESS = KvAddress(host="10.0.0.7", port=4322, engine_id="p1-ab")
KEPT = {"choices": [{"finish_reason": "length"}]}
"""What a vLLM answers that keeps the blocks of a prompt."""
CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_completion_tokens": 50,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.50,
}


def legs(handshake: Handshake, answer: dict[str, Any], **request: Any) -> tuple[Any, Any]:
    """Return the bodies of both legs, as they are sent."""
    body = json.dumps({**CHAT, **request}).encode()
    prefill = handshake.prefill(decode_fields(body), TRANSFER, ADDRESS)
    decode = handshake.decode(decode_fields(body), TRANSFER, ADDRESS, answer)
    return json.loads(msgspec.json.encode(prefill)), json.loads(msgspec.json.encode(decode))


def test_nixl_passes_the_answer_of_the_first_leg_to_the_second() -> None:
    place = {"remote_block_ids": [[1, 2]], "remote_host": "h", "new_field_of_vllm": None}
    prefill, decode = legs(NixlHandshake(), {"kv_transfer_params": place})
    assert decode == {**CHAT, "kv_transfer_params": place}
    assert (prefill["max_tokens"], prefill["max_completion_tokens"], prefill["stream"]) == (1, 1, 0)
    assert not {"stream_options", "min_tokens"} & prefill.keys()
    assert prefill["temperature"] == CHAT["temperature"]
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill["kv_transfer_params"]["remote_host"] is None
    without: list[dict[str, Any]] = [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}]
    for answer in without:
        with pytest.raises(HandshakeFailed):
            legs(NixlHandshake(), answer)


def test_mooncake_names_the_transfer_and_the_first_engine() -> None:
    prefill, decode = legs(MooncakeHandshake(), KEPT)
    assert prefill["kv_transfer_params"]["transfer_id"] == TRANSFER
    assert decode["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://10.0.0.7:4322",
        "remote_engine_id": "p1-ab",
        "transfer_id": TRANSFER,
    }
    with pytest.raises(HandshakeFailed):
        MooncakeHandshake().decode({}, TRANSFER, None, KEPT)


@pytest.mark.parametrize("answer", [{"choices": [{"finish_reason": "stop"}]}, {"choices": []}, {}])
def test_a_mooncake_engine_keeps_nothing_if_the_first_token_ends_the_answer(
    answer: dict[str, Any],
) -> None:
    with pytest.raises(HandshakeFailed):
        MooncakeHandshake().decode({}, TRANSFER, ADDRESS, answer)


def test_sglang_gives_both_legs_the_same_room() -> None:
    prefill, decode = legs(SglangHandshake(), {})
    room = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 4322, "bootstrap_room": 2**63 - 1}
    assert decode == {**CHAT, **room}
    assert {name: prefill[name] for name in room} == room
    assert (prefill["stream"], "stream_options" in prefill) == (False, False)
    six = KvAddress(host="fd00::7", port=1)
    assert SglangHandshake().decode({}, TRANSFER, six, {})["bootstrap_host"] == "[fd00::7]"


def test_tensorrt_llm_gets_the_state_and_the_tokens_of_the_context_phase() -> None:
    state = {"request_type": "context_only", "ctx_request_id": 7, "encoded_opaque_state": "x"}
    answer: dict[str, Any] = {
        "choices": [{"finish_reason": "length", "disaggregated_params": state}],
        "prompt_token_ids": [1, 2, 3],
    }
    prefill, decode = legs(TensorRtLlmHandshake(), answer)
    assert prefill["disaggregated_params"] == {"request_type": "context_only"}
    assert decode["disaggregated_params"] == {**state, "request_type": "generation_only"}
    assert decode["prompt_token_ids"] == [1, 2, 3]
    assert (decode["stream"], prefill["stream"]) == (True, False)
    _, completion = legs(TensorRtLlmHandshake(), answer, prompt="x")
    assert (completion["prompt"], "prompt_token_ids" in completion) == ([1, 2, 3], False)
    ended: dict[str, Any] = {
        **answer,
        "choices": [{**answer["choices"][0], "finish_reason": "stop"}],
    }
    no_state: dict[str, Any] = {"choices": [{}], "prompt_token_ids": [1]}
    wrongs: list[dict[str, Any]] = [{}, {"choices": []}, no_state, ended]
    for wrong in wrongs:
        with pytest.raises(HandshakeFailed):
            legs(TensorRtLlmHandshake(), wrong)


@pytest.mark.parametrize(
    ("fields", "can_split"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": [1, 2]}, True),
        ({"messages": [], "n": 1, "echo": False, "best_of": None}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"messages": [], "n": 2}, False),
        ({"prompt": "x", "best_of": 2}, False),
        ({"prompt": "x", "echo": True}, False),
        ({"prompt": "x", "prompt_logprobs": 0}, False),
    ],
)
def test_only_one_sequence_has_two_legs(fields: dict[str, Any], can_split: bool) -> None:
    decoded = decode_fields(json.dumps(fields).encode())
    for handshake in (NixlHandshake(), MooncakeHandshake(), TensorRtLlmHandshake()):
        assert handshake.can_split(decoded) == can_split
    assert SglangHandshake().can_split(decoded)


def test_cached_tokens_are_those_of_the_prefill_engine() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 12}}
    assert cached_tokens({"usage": usage}) == 12
    wrongs: list[dict[str, Any]] = [{}, {"usage": None}, {"usage": {"prompt_tokens_details": 1}}]
    for wrong in wrongs:
        assert cached_tokens(wrong) == 0


def test_every_field_of_a_handshake_is_removed_from_a_clients_request() -> None:
    answer: dict[str, Any] = {
        "kv_transfer_params": {"remote_block_ids": [[1]]},
        "choices": [{"finish_reason": "length", "disaggregated_params": {}}],
        "prompt_token_ids": [1],
    }
    for handshake in (
        *(NixlHandshake(), MooncakeHandshake(), SglangHandshake(), TensorRtLlmHandshake()),
    ):
        for leg in legs(handshake, answer):
            added = leg.keys() - CHAT.keys() - {"max_tokens", "prompt_token_ids"}
            assert added <= set(ENGINE_FIELDS)


def command_of(driver: str, role: Role, **options: str) -> tuple[EngineCommand, Handshake | None]:
    engine = EngineSettings(driver=driver, options=options, kv_memory_bytes=1 << 20)
    spec = a_spec("r1", engine=engine, device_ids=(DeviceId("gpu0"),))
    spec = msgspec.structs.replace(spec, role=role)
    launch = EngineLaunch(
        spec=spec,
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
        host="10.0.0.7",
        transfer_port=4322,
        start_id="ab",
    )
    return DRIVERS[driver].command(launch), DRIVERS[driver].handshake(spec)


@pytest.mark.parametrize("role", list(Role))
def test_a_vllm_with_a_connector_can_have_either_role(role: Role) -> None:
    command, handshake = command_of("vllm", role, kv_connector="nixl")
    arguments = command.arguments
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_both")
    assert config["kv_load_failure_policy"] == "recompute"
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "4322"
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert isinstance(handshake, NixlHandshake)
    assert not [argument for argument in arguments if "kv-connector" in argument]
    # Both engines must call their model the same, wherever their nodes keep it.
    assert arguments[2] == f"./{command.model_link}"
    assert command.model_link.startswith("model-")
    command, handshake = command_of("vllm", role, kv_connector="mooncake")
    assert command.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "4322"
    assert command.kv_address == KvAddress(host="10.0.0.7", port=4322, engine_id="r1-ab")
    assert isinstance(handshake, MooncakeHandshake)


def test_an_sglang_is_started_for_its_role() -> None:
    transfer = {"disaggregation_transfer_backend": "nixl"}
    command, handshake = command_of("sglang", Role.PREFILL, **transfer)
    line = " ".join(command.arguments)
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port 4322" in line
    assert "--host 10.0.0.7 --port 4321 --served-model-name d" in line.replace(
        f" --api-key {command.api_key}", ""
    ).replace(" --disaggregation-mode prefill --disaggregation-bootstrap-port 4322", "")
    assert len(command.api_key) == 32, "it is not on loopback"
    assert command.base_url == "http://10.0.0.7:4321"
    assert isinstance(handshake, SglangHandshake)
    command, _ = command_of("sglang", Role.DECODE, **transfer)
    line = " ".join(command.arguments)
    assert "--disaggregation-mode decode" in line
    assert ("--host 127.0.0.1" in line, command.api_key, command.kv_address) == (True, "", None)
    command, handshake = command_of("sglang", Role.UNIFIED, **transfer)
    assert "disaggregation" not in " ".join(command.arguments)
    assert handshake is None


def test_a_tensorrt_llm_gets_a_cache_transceiver() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        command, handshake = command_of("tensorrt_llm", role, cache_transceiver_backend="UCX")
        config = command.files["extra.yaml"].decode()
        assert config.endswith("cache_transceiver_config:\n  backend: UCX\n")
        assert ("disable_overlap_scheduler: true" in config) == (role is Role.PREFILL)
        assert "cache_transceiver" not in " ".join(command.arguments)
        assert isinstance(handshake, TensorRtLlmHandshake)


@pytest.mark.parametrize("driver", sorted(DRIVERS))
def test_capabilities_and_handshakes_agree(driver: str) -> None:
    able = ENGINE_CAPABILITIES[driver]
    options = {able.transfer_option: able.transfer_default} if able.transfer_option else {}
    spec = a_spec(engine=EngineSettings(driver=driver, options=options))
    handshake = DRIVERS[driver].handshake(msgspec.structs.replace(spec, role=Role.DECODE))
    assert (handshake is not None) == bool(able.transfer_option)
    assert able.needs_prefill == (handshake is not None and handshake.needs_prefill)
    assert able.transfer_default in (*able.transfer_choices, "")
    assert not able.needs_prefill or able.fixed_roles


def test_all_prefill_replicas_are_candidates_of_a_decode_replica_that_cannot_read() -> None:
    def peer(name: str, token_us: int) -> PeerReplica:
        return PeerReplica(ReplicaId(name), NodeId(name), name, 100, 10, token_us)

    here, slow, silent, quick = (
        *(peer("here", 1), peer("slow", 900)),
        *(peer("silent", 1), peer("quick", 100)),
    )
    queues = {slow.replica_id: 0, quick.replica_id: 10}
    plan = order_all([here, slow, silent, quick], queues, WaitingPromptSize(0, 100))
    assert plan.candidates == [quick, slow, silent]
    assert plan.timeout_s == ONLY_READER_TIMEOUT_S
    # The prompt cannot be read here, whatever the deadline.
    assert {plan.timeout_before_s(left_s) for left_s in (-1, 1, inf)} == {plan.timeout_s}
    none = order_all([here], {}, WaitingPromptSize(0, 100))
    assert (none.choice, none.candidates) == (LegChoice.NO_CANDIDATE, ())
