"""Model files: lies about lengths, shapes and names are refused in words, never followed."""

import contextlib
import mmap
import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.engine.checkpoint.gguf_header import GgufHeader, read_header
from nodeagent.engine.checkpoint.opening import open_checkpoint
from nodeagent.engine.checkpoint.safetensors import SafetensorsFolder
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
    assert header_of(path).metadata["tokenizer.ggml.tokens"] == ["a", "b"]
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


@pytest.mark.parametrize(
    ("body", "said"),
    [
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


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG + "}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="cannot read"):
        SafetensorsFolder(tmp_path)
