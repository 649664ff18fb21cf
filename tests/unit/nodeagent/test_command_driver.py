"""An operator's own server: its command, what a deployment must say, and names in requests."""

from collections.abc import AsyncIterator
from itertools import pairwise
from math import inf
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.engines.command_engine import command_problem, lacking_features_of
from isochrone.wire.engines.engine_capabilities import FEATURES
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import ClusterId, DeviceId, Epoch, Generation, NodeId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Assignment
from nodeagent.api.request.model_name import with_deployment_name, with_model_name
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas.reconcile import LackingParts, reconcile
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import EngineLaunch, UnknownOption
from tests.builders import a_spec

OPTIONS = {"command": "ear", "surfaces": "transcriptions, translations"}
COMMAND = ConfiguredCommand(
    arguments=("serve", "{model}", "--port={port}", '--json={"a":{}}', "--threads", "{threads}"),
    ready_path="/up",
    model_name="{model}",
    environment={"EAR": "1"},
)


def engine(**options: str) -> EngineSettings:
    return EngineSettings(driver="command", options={**OPTIONS, **options})


def launch(**options: str) -> EngineLaunch:
    return EngineLaunch(
        spec=a_spec(engine=engine(**options), device_ids=(DeviceId("gpu1"),)),
        model_path=Path("/models/x"),
        folder=Path("/run/r1"),
        port=4321,
        threads=2,
        commands={"ear": COMMAND},
    )


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    made = DRIVERS["command"].command(launch())
    assert made.arguments == (
        *("serve", "/models/x", "--port=4321", '--json={"a":{}}'),
        *("--threads", "2"),
    )
    assert (made.base_url, made.ready_path) == ("http://127.0.0.1:4321", "/up")
    assert made.model_name == "/models/x"
    devices = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert made.environment == {**devices, "EAR": "1"}


def test_a_command_that_the_node_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownOption, match=r"this node has no \[commands.mouth\]"):
        DRIVERS["command"].command(launch(command="mouth"))
    spec = launch().spec
    assignment = Assignment(
        cluster_id=ClusterId("c"),
        node_id=NodeId("n"),
        generation=Generation(1),
        epoch=Epoch(1),
        replicas=(spec,),
    )
    for by_command, reason in (
        ({}, "this node has no [commands.ear]"),
        ({"ear": "there is no program 'serve'"}, "there is no program 'serve'"),
        ({"ear": ""}, ""),
    ):
        lacking = LackingParts({"command": ""}, by_command)
        steps = reconcile(assignment, {}, dict.fromkeys(spec.device_ids, 0), lacking)
        assert [reason in one.reason for one in steps.refusals] == ([True] if reason else [])
        assert len(steps.starts) == (not reason)


def test_a_command_needs_a_port_and_a_program() -> None:
    assert (
        "no program 'serve-of-no-one'"
        in ConfiguredCommand(arguments=("serve-of-no-one", "{port}")).missing()
    )
    assert ConfiguredCommand(arguments=("sh", "{port}")).missing() == ""
    settings = {"name": "n", "schedulers": [], "state": "/s", "address": "http://a:1"}
    bad: list[dict[str, Any]] = [
        {"arguments": ["serve"]},
        {"arguments": []},
        {"arguments": ["serve", "{port}"], "ready_path": "up"},
        {"arguments": ["serve", "{port}"], "raedy_path": "/up"},
    ]
    for fields in bad:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**settings, "commands": {"ear": fields}}, NodeConfig)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, ""),
        ({"command": ""}, "[commands.NAME]"),
        ({"surfaces": ""}, "with what the server serves"),
        ({"surfaces": "hearing"}, "'hearing' is unknown"),
        ({"surfaces": "chat"}, "another's prompt cache"),
        ({"surfaces": "chat", "shared_prompt_cache": "false"}, "another's prompt cache"),
        ({"surfaces": "chat", "shared_prompt_cache": "true"}, ""),
        ({"concurrency": "0"}, "expected 1 to"),
        ({"concurrency": "many"}, "expected 1 to"),
    ],
)
def test_a_deployment_says_which_server_and_what_it_serves(
    options: dict[str, str], problem: str
) -> None:
    found = command_problem(engine(**options))
    assert problem in found
    assert bool(problem) == bool(found)
    assert command_problem(EngineSettings(driver="mock")) == ""


def test_it_lacks_what_the_deployment_does_not_name() -> None:
    lacking = lacking_features_of(engine())
    assert set(FEATURES) - set(lacking) == {"transcriptions", "translations"}
    assert lacking_features_of(EngineSettings(driver="of a later release")) == ()


@given(sound=st.binary(), name=st.text(st.characters(codec="ascii", exclude_characters='"\r\n')))
def test_only_the_field_model_of_a_form_changes(sound: bytes, name: str) -> None:
    boundary = b"x7MA4YWxkTrZu0gW"
    file = b'content-disposition: form-data; name="file"; filename="model"\r\n\r\n' + sound

    def form(model: str) -> bytes:
        parts = [
            file,
            b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode(),
            b'Content-Disposition: form-data; name="language"\r\n\r\nen',
        ]
        joined = b"\r\n--%b\r\n" % boundary
        return b"--%b\r\n" % boundary + joined.join(parts) + b"\r\n--%b--\r\n" % boundary

    content_type = f'multipart/form-data; boundary="{boundary.decode()}"'
    if b"--" + boundary not in sound:
        assert with_model_name(form(name), content_type, "own") == form("own")


@given(body=st.binary(), content_type=st.text())
def test_a_form_that_cannot_be_read_stays(body: bytes, content_type: str) -> None:
    made = with_model_name(body, f"multipart/form-data; {content_type}", "own")
    assert made == body or b"own" in made


def test_json_gets_the_name() -> None:
    body = b'{"model":"a","input":"x"}'
    named = with_model_name(body, "application/json", "/models/x")
    assert msgspec.json.decode(named) == {"model": "/models/x", "input": "x"}
    with pytest.raises(ApiError):
        with_model_name(b"{", "application/json", "own")


SERVER_NAME = '/models/"x".a'
QUOTED = msgspec.json.encode(SERVER_NAME).decode()[1:-1]


async def answered(kind: str, body: bytes, cuts: list[int]) -> bytes:
    """Return what a client gets of an answer that arrives in pieces."""
    places = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})

    async def pieces() -> AsyncIterator[bytes]:
        for begin, end in pairwise(places):
            yield body[begin:end]

    response = web.StreamResponse(headers={"content-type": kind})
    renamed = with_deployment_name(response, pieces(), SERVER_NAME, "own\\1")
    return b"".join([piece async for piece in renamed])


@given(cuts=st.lists(st.integers(0, 200)))
async def test_an_answer_has_the_deployments_name_however_it_is_cut(cuts: list[int]) -> None:
    text = {"choices": [{"text": f'say {{"model":"{SERVER_NAME}"}}'}]}
    content = msgspec.json.encode(text).decode()[1:-1]
    event = 'data: {"id":1, "model" : "NAME", ' + content + "}\n\n"
    stream = event.replace("NAME", QUOTED + "@main") * 2 + "data: [DONE]\n\n"
    expected = event.replace("NAME", "own\\\\1") * 2 + "data: [DONE]\n\n"
    assert await answered("text/event-stream", stream.encode(), cuts) == expected.encode()
    body = f'{{"model":"{QUOTED}",{content}}}'
    whole = await answered("application/json", body.encode(), cuts)
    assert msgspec.json.decode(whole) == {"model": "own\\1", **text}


async def test_other_names_and_other_answers_stay() -> None:
    body = b'{"model":"/models/y"}'
    assert await answered("application/json", body, [5]) == body
    sound = f'"model":"{QUOTED}"'.encode()
    assert await answered("audio/wav", sound, [5]) == sound


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_large_answer_is_not_copied_with_each_piece_of_it(kind: str) -> None:
    """An answer of 32 MB took 3.6 s of the agent's processor."""
    body = b"0.0123456789," * (1 << 20)
    spent_s = {len(body): inf, 1 << 14: inf}
    for piece_bytes in (*spent_s, *spent_s):
        cuts = list(range(0, len(body), piece_bytes))
        began_s = process_time()
        assert await answered(kind, body, cuts) == body
        spent_s[piece_bytes] = min(spent_s[piece_bytes], process_time() - began_s)
    assert spent_s[1 << 14] < 15 * spent_s[len(body)]
