"""Model files: lies about lengths, shapes and names are refused in words, never followed."""

import contextlib
import json
import mmap
import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.engine.checkpoint.encoder import _pooling
from nodeagent.engine.checkpoint.gguf_header import GgufHeader, read_header
from nodeagent.engine.checkpoint.opening import open_checkpoint
from nodeagent.engine.checkpoint.safetensors import SafetensorsFiles, SafetensorsFolder
from nodeagent.engine.models.shape import CheckpointError

CONFIG = (
    '{"model_type":"llama","hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,'
    '"num_attention_heads":2,"vocab_size":10,"max_position_embeddings":32'
)


def write_gguf(path: Path, architecture: str = "llama") -> bytes:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def header_of(path: Path) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_header(path, data)


def test_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    assert header_of(path).metadata["tokenizer.ggml.tokens"].read() == ["a", "b"]
    assert header_of(path).metadata["llama.block_count"] == 1


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_broken_header_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    whole = bytearray(write_gguf(path))
    end = data.draw(st.integers(1, len(whole)))
    whole = whole[:end]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, end - 1))
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    # Nothing but a refusal in words may come out, and quickly.
    with contextlib.suppress(CheckpointError):
        header_of(path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, kind: int, offset: int) -> bytes:
    """An entry for eight numbers."""
    return text(name) + struct.pack("<IQIQ", 1, 8, kind, offset)


def with_tensors(*entries: bytes) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 0)
    return head + b"".join(entries) + bytes(256)


def with_metadata(*entries: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
"""An array of an array of an array ..., as deep as it likes."""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (with_tensors(tensor(b"a", 0, 0), tensor(b"b", 0, 16)), "a and b overlap"),
        (with_tensors(tensor(b"a", 0, 32), tensor(b"b", 0, 32)), "a and b overlap"),
        (with_tensors(tensor(b"a", 0, 2**63)), "a lies past its end"),
        (with_tensors(tensor(b"a", 0, 2**64 - 8)), "a lies past its end"),
        (with_tensors(tensor(b"a", 999, 0)), "a has unknown type 999"),
        (with_tensors(tensor(b"a", 0, 0), tensor(b"a", 0, 64)), "'a' is there twice"),
        (with_metadata(text(b"k") + NESTED), "is an array of type 9"),
        (with_metadata(*[text(b"k") + struct.pack("<II", 4, 7)] * 2), "'k' is there twice"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "claims 9223372036854775808 bytes"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, body: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(body)
    with pytest.raises(CheckpointError, match=said):
        header_of(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot read"),
        (CONFIG.replace("llama", "mamba") + "}", "model_type 'mamba'"),
        (CONFIG.replace('"vocab_size":10', '"vocab_size":"x"') + "}", "vocab_size"),
        (
            CONFIG.replace('"num_attention_heads":2', '"num_attention_heads":0') + "}",
            "no attention",
        ),
        (CONFIG + ',"num_key_value_heads":3}', "cannot share 3 KV heads"),
        (CONFIG + ',"attention_bias":true}', "biases"),
        (CONFIG + ',"rope_scaling":{"type":"yarn","factor":4}}', "rope scaling 'yarn'"),
        (CONFIG + ',"rope_scaling":{"rope_type":"llama3","factor":-1}}', "must be positive"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        SafetensorsFolder(tmp_path)


def test_an_index_may_not_point_outside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG + "}")
    index = '{"weight_map":{"w":"../../etc/x.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="is no file of this folder"):
        SafetensorsFolder(tmp_path)


def stored(*places: tuple[int, int], dtype: str = "F32") -> bytes:
    """A safetensors file of tensors of eight numbers at these places."""
    entries = {
        f"t{number}": {"dtype": dtype, "shape": [8], "data_offsets": place}
        for number, place in enumerate(places)
    }
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + bytes(64)


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        stored((0, 32), (16, 48)),
        stored((0, 32), (0, 32)),
        stored((32, 0), (32, 64)),
        stored((0, 2**63), (32, 64)),
        stored((0, 32), (32, 64), dtype="F99"),
        stored((0, 16), (16, 64)),
        stored((0, 32), (32, 64))[:-1],
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
    ids=lambda body: repr(body[8:60]),
)
def test_a_hostile_safetensors_file_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "config.json").write_text(CONFIG + "}")
    (tmp_path / "model.safetensors").write_bytes(body)
    with pytest.raises(CheckpointError, match="cannot read"):
        SafetensorsFolder(tmp_path)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_broken_safetensors_file_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    whole = bytearray(stored((0, 32), (32, 64)))
    end = data.draw(st.integers(0, len(whole)))
    whole = whole[: max(end, data.draw(st.sampled_from([0, len(whole)])))]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(whole)))
        whole[at : at + 1] = data.draw(st.binary(max_size=3))
    path.write_bytes(whole)
    with contextlib.suppress(CheckpointError):
        source = SafetensorsFiles(tmp_path)
        try:
            for name in source.names():
                source.tensor(name, (8,))
        finally:
            source.close()


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({"mean_tokens"}, "mean"),
        ({"cls_token"}, "cls"),
        ({"max_tokens"}, r"pooling by \['pooling_mode_max_tokens'\]"),
        ({"mean_tokens", "of_tomorrow"}, "of_tomorrow"),
        (set(), r"pooling by \[\]"),
    ],
)
def test_pooling_is_as_the_folder_says_or_refused(
    tmp_path: Path, chosen: set[str], found: str
) -> None:
    kinds = ("Transformer", "Pooling")
    steps = [{"path": "pool", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    modes = {f"pooling_mode_{name}": True for name in chosen}
    config = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": False, **modes}
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps(config))
    if found in ("mean", "cls"):
        assert _pooling(tmp_path) == (found, False)
        return
    with pytest.raises(CheckpointError, match=found):
        _pooling(tmp_path)
