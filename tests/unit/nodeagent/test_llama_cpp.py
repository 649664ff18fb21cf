"""The driver of llama.cpp: its command, its memory, its privacy, and GGUF headers."""

import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.service.gguf_metadata import GgufError, attention_size, read_metadata
from isochrone.wire.errors import ApiError
from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import CHAT_PATH, EngineLaunch, UnknownOption
from nodeagent.drivers.llama_cpp import ARGUMENTS, NO_CACHE, gguf_file
from nodeagent.drivers.request_body import PLAIN, with_fields
from scheduler.api.admin.deployments import engine_problem
from tests.builders import a_spec

DRIVER = DRIVERS["llama_cpp"]
TOKEN_BYTES = 2 * 3 * (16 + 16) * 2
"""f16 keys and values of 16, of 3 heads in 2 layers."""


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def uint(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def array(key: str, kind: int, items: list[bytes]) -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def gguf(*entries: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


LLAMA = (
    entry("general.architecture", 8, text("llama")),
    array("tokenizer.ggml.tokens", 8, [text("a"), text("bc")]),
    array("tokenizer.ggml.scores", 6, [struct.pack("<f", 0.5)] * 2),
    uint("llama.block_count", 2),
    uint("llama.embedding_length", 96),
    uint("llama.attention.head_count", 6),
    uint("llama.attention.head_count_kv", 3),
)


def a_launch(folder: Path, device: str = "cpu", **fields: Any) -> EngineLaunch:
    (folder / "m.gguf").write_bytes(gguf(*LLAMA))
    engine = EngineSettings(driver="llama_cpp", **{"kv_memory_bytes": 0, **fields})
    return EngineLaunch(
        spec=a_spec(name="m", engine=engine, context_tokens=100, device_ids=(DeviceId(device),)),
        model_path=folder,
        folder=folder,
        port=1,
        threads=6,
    )


def line(launch: EngineLaunch) -> str:
    return " ".join(DRIVER.command(launch).arguments)


def test_on_a_cpu_it_gets_the_threads_and_short_steps(tmp_path: Path) -> None:
    command = DRIVER.command(a_launch(tmp_path))
    text = " ".join(command.arguments)
    assert text.startswith(f"llama-server --model {tmp_path}/m.gguf --alias m --host {tmp_path}/")
    assert "--ctx-size 400 --device none --n-gpu-layers 0" in text
    for part in ("--threads 6", "--batch-size 128", "--parallel 4", "--no-kv-unified", "--offline"):
        assert part in text
    assert (command.base_url, command.socket) == ("http://localhost", f"{tmp_path}/engine.sock")
    given = {argument for argument in command.arguments if argument.startswith("--")}
    assert given <= set(ARGUMENTS), "the check of the version knows them all"
    # It answers no health check within a step, and some processors take seconds for one.
    assert command.stall_s == 60.0
    assert DRIVER.command(a_launch(tmp_path, "gpu0")).stall_s == 0.0


def test_on_a_gpu_it_puts_all_layers_there(tmp_path: Path) -> None:
    assert "--n-gpu-layers all" in line(a_launch(tmp_path, "gpu0"))
    some = line(a_launch(tmp_path, "gpu0", options={"n_gpu_layers": "7"}))
    assert "--n-gpu-layers 7" in some
    assert "--n-gpu-layers all" not in some
    assert "--batch-size" not in some


@pytest.mark.parametrize(
    ("kv_tokens", "options", "expected"),
    [
        (950, {}, "--parallel 9 --no-kv-unified --ctx-size 900"),
        (100_000, {}, "--parallel 32 --no-kv-unified --ctx-size 3200"),
        (950, {"parallel": "2"}, "--parallel 2 --no-kv-unified --ctx-size 200"),
        (950, {"parallel": "20"}, "--parallel 20 --kv-unified --ctx-size 950"),
        (950, {"kv_unified": "true"}, "--parallel 9 --kv-unified --ctx-size 900"),
        (950, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, "--parallel 17 --ctx-size 1700"),
        (99, {}, "hold 99 tokens, too few for one sequence"),
        (950, {"parallel": "20", "kv_unified": "false"}, "too few for 20 sequences of 100"),
        (950, {"parallel": "20", "kv_unified": "False"}, "too few for 20 sequences of 100"),
        (950, {"parallel": "4096"}, "cannot use parallel '4096'"),
        (950, {"cache_type_k": "f8"}, "cannot use cache type 'f8': expected one of f32"),
    ],
)
def test_its_kv_cache_stays_within_the_plan(
    tmp_path: Path, kv_tokens: int, options: dict[str, str], expected: str
) -> None:
    launch = a_launch(tmp_path, kv_memory_bytes=kv_tokens * TOKEN_BYTES, options=options)
    if not expected.startswith("--"):
        with pytest.raises(UnknownOption, match=expected):
            DRIVER.command(launch)
        return
    for part in ("--" + part.strip() for part in expected.split("--")[1:]):
        assert part in line(launch)


def test_tenants_share_no_prompts_unless_the_deployment_says_so(tmp_path: Path) -> None:
    alone = DRIVER.command(a_launch(tmp_path))
    assert NO_CACHE in alone.arguments
    sent = with_fields(b'{"cache_prompt":true,"id_slot":3}', DRIVER.body_fields(alone, "s", 50))
    sse = {"sse_ping_interval": -1}
    assert msgspec.json.decode(sent) == {"cache_prompt": False, "id_slot": -1, **sse}
    shared = DRIVER.command(a_launch(tmp_path, options={"shared_prompt_cache": "true"}))
    assert NO_CACHE not in shared.arguments
    assert DRIVER.body_fields(shared, "s", 50)["cache_prompt"]
    assert not any("shared" in argument for argument in shared.arguments)
    assert CHAT_PATH in DRIVER.salted_paths
    assert DRIVER.resumes == headers.INEXACT


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({}, False),
        ({"spec_type": "ngram-simple"}, False),
        ({"spec_type": "draft-simple,ngram-simple", "spec_draft_model": "/d.gguf"}, False),
        ({"spec_type": "ngram-mod"}, True),
        ({"spec_type": "ngram-simple, ngram-cache"}, True),
        ({"spec_type": "ngram-mod", "shared_prompt_cache": "false"}, True),
        ({"spec_type": "ngram-mod", "shared_prompt_cache": "true"}, False),
    ],
)
def test_drafts_from_texts_of_other_tenants_are_refused(
    tmp_path: Path, options: dict[str, str], is_refused: bool
) -> None:
    launch = a_launch(tmp_path, options=options)
    refused = engine_problem(launch.spec.engine)
    assert bool(refused) is is_refused
    if not is_refused:
        DRIVER.command(launch)
        return
    assert refused is not None
    assert refused.reason.endswith("give --option shared_prompt_cache=true")
    with pytest.raises(UnknownOption, match="draft one tenant's answer from another's texts"):
        DRIVER.command(launch)


def test_a_client_cannot_use_the_servers_own_names_for_checked_fields(tmp_path: Path) -> None:
    """With `n_predict` an answer went on beyond its `max_tokens`."""
    command = DRIVER.command(a_launch(tmp_path))
    own: dict[str, Any] = dict.fromkeys(("n_predict", "n_cmpl", "n_probs"), 9)
    own |= {"chat_format": 9, "grammar_triggers": [{"type": 2, "value": "(a|a)*b"}]}
    own |= {"sse_ping_interval": 1, "return_progress": True}
    body = msgspec.json.encode({"max_tokens": 1, "min_p": 0.1, **own})
    values = DRIVER.body_fields(command, "s", 50)
    sent = msgspec.json.decode(with_fields(body, values, command))
    assert sent.keys() == {"max_tokens", "min_p", "cache_prompt", "id_slot", "sse_ping_interval"}
    assert sent["sse_ping_interval"] == -1


@pytest.mark.parametrize(
    ("field", "value", "is_refused"),
    [
        ("top_logprobs", 20, False),
        ("top_logprobs", 21, True),
        ("repeat_last_n", 100, False),
        ("repeat_last_n", 101, True),
        ("repeat_last_n", 2e9, True),
        ("repeat_last_n", -1, False),
        ("repeat_last_n", -(2**31) - 1, True),
        ("dry_penalty_last_n", 2**31 - 1, True),
        ("samplers", ["top_k"] * 33, True),
        ("samplers", "k" * 33, True),
        ("samplers", "kp", False),
        ("dry_sequence_breakers", ["a"] * 8, False),
        ("dry_sequence_breakers", ["a"] * 9, True),
    ],
)
def test_a_field_without_bounds_in_the_server_has_some_here(
    tmp_path: Path, field: str, value: Any, is_refused: bool
) -> None:
    """A window of 2^31 tokens for penalties takes 8 GiB of zeroes."""
    command = DRIVER.command(a_launch(tmp_path))
    body = msgspec.json.encode({field: value})
    if not is_refused:
        assert field.encode() in with_fields(body, {}, command)
        return
    with pytest.raises(ApiError, match=f"cannot use field '{field}'") as refused:
        with_fields(body, {}, command)
    assert refused.value.param == field


def nested(count: int) -> dict[str, Any]:
    """Return a schema that is a chain of references."""
    links = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(count - 1)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count - 1}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(1000)}}}, ""),
        ({"response_format": {"json_schema": {"schema": nested(1001)}}}, "response_format"),
        ({"tools": [{"type": "function", "function": nested(1001)}]}, "tools"),
        ({"json_schema": {"pattern": "(" * 1001}}, "json_schema"),
        ({"grammar": f'root ::= {"(" * 1000}"a"{")" * 1000}'}, ""),
        ({"grammar": f'root ::= {"(" * 1001}"a"{")" * 1001}'}, "grammar"),
        ({"tools": [{"type": "function", "function": {"description": "()" * 1001}}]}, ""),
    ],
)
def test_a_schema_that_overflows_the_stack_of_the_server_is_refused(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    """It ended the engine, and the answers of all other clients with it."""
    command = DRIVER.command(a_launch(tmp_path))
    data = msgspec.json.encode(body)
    if not param:
        assert with_fields(data, {}, command) == data
        return
    with pytest.raises(ApiError, match=f"cannot use field '{param}'.* 1000 references") as refused:
        with_fields(data, {}, command)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "tool", [{"type": "custom", "custom": {"name": "f"}}, {"type": "function"}, {}, "f"]
)
def test_a_tool_that_is_no_function_is_the_clients_fault(tmp_path: Path, tool: Any) -> None:
    """The server answers 500: routers tried all replicas, and took each for a failed one."""
    command = DRIVER.command(a_launch(tmp_path))
    body = msgspec.json.encode({"tools": [tool]})
    with pytest.raises(ApiError, match="cannot use field 'tools': expected tools of type"):
        with_fields(body, {}, command)


def test_a_refusal_alone_is_the_content_of_its_message(tmp_path: Path) -> None:
    """The server refuses messages without content."""
    command = DRIVER.command(a_launch(tmp_path))
    call = {"role": "assistant", "refusal": "no", "tool_calls": [{"id": "1"}]}
    said = {"role": "assistant", "content": "yes", "refusal": None}
    alone = {"role": "assistant", "refusal": "no"}
    body = msgspec.json.encode({"messages": [call, said, alone]})
    sent = msgspec.json.decode(with_fields(body, {}, command))
    assert sent["messages"] == [call, said, {**alone, "content": "no"}]


def test_its_statistics_are_read() -> None:
    page = (
        b"llamacpp:prompt_tokens_total 30\nllamacpp:prompt_tokens_cached_total 12\n"
        b"llamacpp:tokens_predicted_total 7\nllamacpp:n_decode_total 9\n"
        b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
        b"llamacpp:predicted_tokens_seconds 55.5\n"
    )
    stats = DRIVER.read_stats(page)
    assert (stats.prompt_tokens_total, stats.prefix_hit_tokens_total) == (42, 12)
    assert (stats.tokens_out_total, stats.steps_total) == (7, 9)
    assert (stats.running, stats.waiting, stats.decode_tokens_per_s) == (2, 1, 55.5)


def test_a_folder_must_hold_one_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="found none"):
        gguf_file(tmp_path)
    for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "mmproj-x.gguf"):
        (tmp_path / name).touch()
    assert gguf_file(tmp_path).name == "x-00001-of-00002.gguf"
    (tmp_path / "y.gguf").touch()
    with pytest.raises(UnknownOption, match=r"found x-00001-of-00002.gguf, y.gguf; convert"):
        gguf_file(tmp_path)


def test_a_build_without_our_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    # The first line of a script cannot name a path with a space, which the checkout's may have.
    interpreter = tmp_path / "python3"
    interpreter.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))

    def missing(script: str) -> str:
        program.write_text(f"#!{interpreter}\n{script}")
        program.chmod(0o755)
        return DRIVER.missing()

    assert missing(f"print({' '.join(ARGUMENTS)!r})") == ""
    few = " ".join(argument for argument in ARGUMENTS if argument != "--cache-ram")
    assert "is too old: it has no --cache-ram" in missing(f"print({few!r})  # old")
    assert "libllama.so" in missing("import sys; sys.exit('cannot open libllama.so')")


def test_a_gguf_header_gives_the_size_of_the_attention(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def size(*entries: bytes) -> tuple[int, int]:
        path.write_bytes(gguf(entry("general.architecture", 8, text("llama")), *entries))
        found = attention_size(path)
        return found.keys, found.values

    assert size(*LLAMA[1:]) == (96, 96)
    per_layer = [struct.pack("<i", heads) for heads in (1, 3)]
    wide = (uint("llama.attention.key_length", 32), uint("llama.attention.value_length", 8))
    assert size(*LLAMA[1:6], array("llama.attention.head_count_kv", 5, per_layer)) == (64, 64)
    assert size(*LLAMA[1:], *wide) == (192, 48)
    latent = (uint("llama.attention.kv_lora_rank", 512), uint("llama.rope.dimension_count", 64))
    assert size(*LLAMA[1:], *latent) == (2 * 576, 0)
    with pytest.raises(GgufError, match="no dimensions of its attention"):
        size()


@given(st.integers(0, 400), st.binary(max_size=12))
def test_a_damaged_header_is_refused(tmp_path_factory: Any, cut: int, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = gguf(*LLAMA)
    path.write_bytes(whole[:cut] + noise + whole[cut + len(noise) :] * (cut % 2))
    with suppress(GgufError):
        read_metadata(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"\x7fELF" + bytes(40),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62),
        gguf(entry("a", 77, b"")),
        gguf(entry("a", 9, struct.pack("<IQ", 4, 2**60))),
    ],
)
def test_a_hostile_header_is_refused_without_reading_much(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=r"^cannot "):
        read_metadata(path)


@pytest.mark.parametrize(
    ("template", "may_force"),
    [("{% for t in tools %}{{ t }}{% endfor %}", True), ("{{ messages }}", False), ("", False)],
)
def test_a_call_can_be_required_if_the_template_has_tools(
    tmp_path: Path, template: str, may_force: bool
) -> None:
    launch = a_launch(tmp_path)
    entries = (entry("tokenizer.chat_template", 8, text(template)),) if template else ()
    (tmp_path / "m.gguf").write_bytes(gguf(*LLAMA, *entries))
    assert DRIVER.command(launch).may_force_tools is may_force


@pytest.mark.parametrize(
    ("choice", "is_refused"),
    [('"required"', True), ('{"type":"function"}', True), ('"auto"', False), ("null", False)],
)
def test_a_required_call_is_refused_where_the_engine_would_ignore_it(
    choice: str, is_refused: bool
) -> None:
    body = f'{{"tools":[{{}}],"tool_choice":{choice}}}'.encode()
    command = msgspec.structs.replace(PLAIN, may_force_tools=False)
    assert b"tool_choice" in with_fields(body, {})
    if not is_refused:
        assert b"tool_choice" in with_fields(body, {}, command)
        return
    with pytest.raises(ApiError, match="template of this model has no tools") as refused:
        with_fields(body, {}, command)
    assert refused.value.param == "tool_choice"
