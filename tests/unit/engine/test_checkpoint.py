"""Model files: lies about lengths, shapes and names are refused in words, never followed."""

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.encoder.bert_folder import _pooling
from nodeagent.engine.model.families import FAMILIES
from nodeagent.engine.weights.checkpoint import open_checkpoint
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.gguf_header import read_header
from nodeagent.engine.weights.hf_config import MODEL_TYPES, read_json
from nodeagent.engine.weights.safetensors_folder import SafetensorsFiles, SafetensorsFolder
from ops.golden import tiny_gguf

CONFIG = (
    '{"model_type":"llama","hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,'
    '"num_attention_heads":2,"vocab_size":10,"max_position_embeddings":32'
)


HUGE = 10**400
LLAMA3 = ',"rope_scaling":{"rope_type":"llama3","original_max_position_embeddings":%d}}'
ONE_TOKEN = ',"rope_scaling":{"type":"yarn","original_max_position_embeddings":1}}'
ZERO_DIVISOR = (
    f',"rope_scaling":{{"type":"yarn","factor":{math.e},"mscale":1,"mscale_all_dim":-10}}}}'
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


def test_the_config_reader_accepts_exactly_the_families_that_are_built() -> None:
    assert frozenset(FAMILIES) == MODEL_TYPES


def test_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    assert read_header(path).metadata["tokenizer.ggml.tokens"].read() == ["a", "b"]
    assert read_header(path).metadata["llama.block_count"] == 1


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
        read_header(path)


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
        (with_tensors(tensor(b"a", 0, 0), tensor(b"a", 0, 64)), "'a' occurs twice"),
        (with_metadata(text(b"k") + NESTED), "is an array of type 9"),
        (with_metadata(*[text(b"k") + struct.pack("<II", 4, 7)] * 2), "'k' occurs twice"),
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
        read_header(path)


SPARSE_BYTES = 1 << 38
LONG = struct.pack("<Q", 1 << 37)
"""The length of a string for which this machine has no memory, and the file has no blocks."""


@pytest.mark.parametrize(
    "head",
    [
        with_metadata(text(b"k") + struct.pack("<I", 8) + LONG),
        with_metadata(LONG),
        with_metadata(text(b"k") + struct.pack("<IIQ", 9, 8, 1) + LONG),
        with_tensors(LONG)[:-256],
    ],
    ids=["a value", "a key", "an array", "a tensor's name"],
)
def test_a_long_text_is_refused_before_it_is_read(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    os.truncate(path, SPARSE_BYTES)
    with pytest.raises(CheckpointError, match=r"takes 1\d{11} bytes|more than 67108864 bytes"):
        read_header(path)


PARTS = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def parts_in(folder: Path) -> list[Path]:
    """Write a model in three parts."""
    folder.mkdir(exist_ok=True)
    tiny_gguf.write_gguf(folder / "m.gguf", "qwen3", part_tensors_max=13)
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    return [folder / name for name in PARTS]


def test_a_model_in_parts_opens_by_its_folder_and_by_each_part(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "one.gguf", "qwen3")
    parts = parts_in(tmp_path / "Q4_K_M")
    whole = open_checkpoint(tmp_path / "one.gguf")
    (tmp_path / "one.gguf").unlink()
    for path in (*parts, tmp_path / "Q4_K_M", tmp_path):
        source = open_checkpoint(path)
        assert source.shape == whole.shape
        assert source.filed_bits() == whole.filed_bits()
        for layer in range(3):
            name, shape = f"model.layers.{layer}.mlp.down_proj.weight", (32, 48)
            assert source.tensor(name, shape).equal(whole.tensor(name, shape))
            stored = source.stored(name, shape)
            assert stored is not None
            assert stored.path in parts
        source.close()
    whole.close()


def test_weights_need_no_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = read_header(path)
    kept = whole.without_vocabulary()
    assert whole.metadata.keys() - kept.metadata.keys() == {"tokenizer.ggml.tokens"}


def test_a_known_header_is_not_read_again_unless_a_file_changed(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    first = open_checkpoint(tmp_path)
    assert isinstance(first, GgufFile)
    again = open_checkpoint(tmp_path, first.known)
    assert isinstance(again, GgufFile)
    assert again.known is first.known
    assert again.shape == first.shape
    name, shape = "model.layers.2.mlp.down_proj.weight", (32, 48)
    assert again.tensor(name, shape).equal(first.tensor(name, shape))
    os.utime(parts[1], (1, 1))
    changed = open_checkpoint(tmp_path, first.known)
    assert isinstance(changed, GgufFile)
    assert changed.known is not first.known
    for source in (first, again, changed):
        source.close()


def say(path: Path, key: str, value: int) -> None:
    """Change what a file says of how it was split."""
    body = bytearray(path.read_bytes())
    at = body.index(text(f"split.{key}".encode())) + 8 + len(f"split.{key}")
    (kind,) = struct.unpack_from("<I", body, at)
    struct.pack_into({2: "<H", 5: "<i"}[kind], body, at + 4, value)
    path.write_bytes(body)


def other(parts: list[Path]) -> None:
    """Put another model's part in the place of the second."""
    folder = parts[0].parent / "other"
    folder.mkdir()
    tiny_gguf.write_gguf(folder / "m.gguf", "qwen3", part_tensors_max=12)
    shutil.move(folder / PARTS[1], parts[1])
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda parts: parts[0].unlink(), "00001-of-00003.gguf: No such file"),
        (lambda parts: parts[2].unlink(), "m-00003-of-00003.gguf, one of its 3 parts, is missing"),
        (lambda parts: shutil.copy(parts[0], parts[1]), "it is part 1 of 3"),
        (lambda parts: shutil.copy(parts[1], parts[0]), "it is part 0 of 3"),
        (lambda parts: say(parts[1], "no", 2), "00003.gguf: by its name it is part 1 of 3"),
        (lambda parts: say(parts[0], "count", 2), "it is one of 2 parts"),
        (lambda parts: say(parts[0], "count", 0), "it is one of 0 parts"),
        (lambda parts: say(parts[2], "count", 4), r"metadata \[2, 4\]"),
        (lambda parts: say(parts[0], "tensors.count", 36), "hold 35 tensors, 36 are expected"),
        (lambda parts: os.truncate(parts[2], parts[2].stat().st_size - 1), "lies past its end"),
        (lambda parts: parts[0].rename(parts[0].with_name("m.gguf")), "and 2 models"),
        (lambda parts: shutil.copy(parts[2], parts[2].with_name("x.gguf")), "and 2 models"),
        (other, "in another part too"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, spoil: Callable[[list[Path]], object], said: str
) -> None:
    spoil(parts_in(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, *_ = parts_in(tmp_path)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts, which must be named NAME-00001-of"):
        open_checkpoint(renamed)


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
        (CONFIG + ',"rope_scaling":{"type":"dynamic","factor":4}}', "rope scaling 'dynamic'"),
        (CONFIG + ',"rope_scaling":{"type":"yarn","factor":-1}}', "rope scaling by Yarn"),
        (CONFIG + ',"rope_scaling":{"type":"yarn","factor":1e300}}', "rope scaling by Yarn"),
        (CONFIG + ',"rope_scaling":{"type":"yarn","beta_fast":1e-320}}', "rope scaling by Yarn"),
        (CONFIG + ',"rope_theta":1,"rope_scaling":{"type":"yarn"}}', "theta 1.0"),
        (
            CONFIG.replace(":32", ":1000") + ',"rope_scaling":{"type":"yarn","factor":4e9}}',
            "model of this shape",
        ),
        (CONFIG + ',"rope_scaling":{"rope_type":"llama3","factor":-1}}', "a factor of -1"),
        (CONFIG + LLAMA3 % -1, "rope scaling of -1 tokens"),
        (CONFIG + LLAMA3 % HUGE, "rope scaling of 1000"),
        (CONFIG + ZERO_DIVISOR, "rope scaling: float division by zero"),
        (CONFIG.replace(":32", f":{HUGE}") + ONE_TOKEN, "rope scaling: integer division result"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["m.gguf", "config.json", "model.safetensors"])
def test_a_pipe_is_refused_not_waited_for(tmp_path: Path, name: str) -> None:
    if name == "model.safetensors":
        (tmp_path / "config.json").write_text(CONFIG + "}")
    os.mkfifo(tmp_path / name)
    path = tmp_path / name if name == "m.gguf" else tmp_path
    with pytest.raises(CheckpointError, match=f"{name}: it is not a regular file"):
        open_checkpoint(path)


def test_a_path_that_the_system_refuses_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    """An adapter's path comes with a request, which must be answered with a reason."""
    with pytest.raises(CheckpointError, match="File name too long"):
        read_json(tmp_path / ("a" * 300) / "adapter_config.json", dict)


def test_an_index_may_not_point_outside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG + "}")
    index = '{"weight_map":{"w":"../../etc/x.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"is not a \.safetensors file of"):
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
