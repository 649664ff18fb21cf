"""Builds a catalogue entry from a model's files: sizes, digests and the values of its config."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.service.gguf_metadata import GgufError, attention_size, read_metadata
from isochrone.service.trust.model_signature import (
    SIGNATURE_FILE,
    SignatureError,
    check_signed_files,
)
from isochrone.wire.models.artifact import check_path, is_hidden, manifest_digest
from isochrone.wire.models.gguf_shape import gguf_shape
from isochrone.wire.models.model import SIGNATURE_CHARS_MAX, Artifact, ArtifactFile
from isochrone.wire.models.model_shape import BadConfig, kv_bytes_per_token, shape_of

CACHED_VALUE_BYTES: Final = 2
"""A value of the KV cache in 16 bits, as engines keep it by default."""
KINDS: Final = {
    "BertModel": "embedding",
    "WhisperForConditionalGeneration": "transcription",
}
"""Kinds of models by architecture; all others are chat models, or classifiers."""
CLASSIFIER: Final = "ForSequenceClassification"
"""The end of the name of an architecture that has labels: with one it ranks, else it classifies."""
LABELS_DEFAULT: Final = 2
"""Labels of a config that names none."""


class _TextFields(msgspec.Struct):
    """The field of the language model in a model for text and images."""

    max_position_embeddings: int | None = None


class _ConfigFields(msgspec.Struct):
    """The fields of config.json that are read directly."""

    architectures: tuple[str, ...] | None = None
    max_position_embeddings: int | None = None
    max_target_positions: int | None = None
    """The context of a decoder that reads audio."""
    num_labels: int | None = None
    id2label: dict[str, str] | None = None
    text_config: _TextFields | None = None


class _SentenceFields(msgspec.Struct):
    """The field of sentence_bert_config.json that limits the texts of an encoder."""

    max_seq_length: int | None = None


class ManifestError(Exception):
    """No catalogue entry can be made from the folder; the message says why."""


def artifact_of(folder: Path, source: str, only: tuple[str, ...] = ()) -> Artifact:
    """Hash every file below `folder`, or `only` those named, and return the artifact.

    Raises ManifestError.
    """
    if not folder.is_dir():
        raise ManifestError(f"cannot read {folder}: there is no such folder")
    paths = [folder / name for name in only] or [
        path
        for path in sorted(folder.rglob("*"))
        # A link whose target is missing is named below, not left out.
        if (path.is_file() or not path.exists())
        and not is_hidden(path.relative_to(folder))
        and path != folder / SIGNATURE_FILE
    ]
    if source.startswith("file:"):
        for path in paths:
            if path.is_symlink():
                raise ManifestError(
                    f"cannot use {path}: it is a symbolic link, which nodes do not follow; copy"
                    " the folder with cp -rL, and add the copy"
                )
    files = tuple(_hashed_file(folder, path) for path in paths)
    if not files:
        raise ManifestError(f"cannot use {folder}: it contains no files")
    for file in files:
        problem = check_path(file.path)
        if problem:
            raise ManifestError(problem)
    return Artifact(source=source, files=files, digest=manifest_digest(files))


def signed(artifact: Artifact, path: Path) -> Artifact:
    """Return an artifact with the signature in a file, which must list the artifact's files.

    The scheduler and the nodes verify which key has made it. Raises ManifestError.
    """
    try:
        text = path.read_bytes()[: SIGNATURE_CHARS_MAX + 1].decode()
        artifact = msgspec.structs.replace(artifact, signature=text)
        check_signed_files(artifact)
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, SignatureError) as error:
        raise ManifestError(f"{path}: {error}") from error
    return artifact


def config_values(folder: Path, files: Sequence[str] = (), kind: str = "") -> dict[str, Any]:
    """Return the entry's values from a Hugging Face config.json, else from the first GGUF file.

    Values that it does not state are left out, and all of them if there is neither. `files` are
    those of the model; default: all of the folder. `kind` is the model's, if it is known: only a
    chat model must have the sizes of a KV cache. Raises ManifestError.
    """
    path, sentence_path = folder / "config.json", folder / "sentence_bert_config.json"
    weights = sorted(files or (found.name for found in folder.glob("*.gguf")))
    gguf = [folder / name for name in weights if name.endswith(".gguf") and "mmproj" not in name]
    if not path.exists() or (files and path.name not in files):
        return _gguf_values(gguf[0]) if gguf else {}
    sentence = _SentenceFields()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        fields = msgspec.convert(config, _ConfigFields)
        if sentence_path.exists():
            path = sentence_path
            sentence = msgspec.json.decode(path.read_bytes(), type=_SentenceFields)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"cannot read {path}: {error}") from error
    architecture = (fields.architectures or ("",))[0]
    values: dict[str, Any] = {"kind": KINDS.get(architecture, "chat")}
    if architecture:
        values["architecture"] = architecture
    for stated in (fields, fields.text_config):
        if stated is not None and stated.max_position_embeddings is not None:
            values["context_tokens"] = stated.max_position_embeddings
    if architecture.endswith(CLASSIFIER):
        labels = _labels(fields)
        values["kind"] = "rerank" if len(labels) == 1 else "classify"
        values["labels"] = labels if len(labels) > 1 else ()
    if (kind or values["kind"]) != "chat":
        # The embedded engine has the same limit.
        limits = (
            fields.max_target_positions or fields.max_position_embeddings,
            sentence.max_seq_length,
        )
        if found := [limit for limit in limits if limit is not None]:
            values["context_tokens"] = min(found)
        return values
    try:
        shape = shape_of(config)
    except BadConfig as error:
        raise ManifestError(f"{error} in {path}") from error
    return {
        **values,
        "kv_bytes_per_token": int(kv_bytes_per_token(shape)),
        "shape": msgspec.to_builtins(shape),
    }


def _labels(fields: _ConfigFields) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in the order of its output."""
    names = fields.id2label or {}
    count = fields.num_labels or len(names) or LABELS_DEFAULT
    return tuple(names.get(str(number), f"LABEL_{number}") for number in range(count))


def _gguf_values(path: Path) -> dict[str, Any]:
    try:
        metadata = read_metadata(path)
        cached = attention_size(path)
    except GgufError as error:
        raise ManifestError(str(error)) from error
    architecture = str(metadata.get("general.architecture", ""))
    context_tokens = metadata.get(f"{architecture}.context_length")
    if not isinstance(context_tokens, int) or context_tokens < 1:
        raise ManifestError(f"cannot read {path}: it states no context length")
    values: dict[str, Any] = {
        "architecture": architecture,
        "context_tokens": context_tokens,
        "kv_bytes_per_token": CACHED_VALUE_BYTES * (cached.keys + cached.values),
    }
    shape = gguf_shape(metadata)
    # Layers that differ from each other do not fit in a shape.
    if shape is not None and int(kv_bytes_per_token(shape)) == values["kv_bytes_per_token"]:
        values["shape"] = msgspec.to_builtins(shape)
    return values


def _hashed_file(folder: Path, path: Path) -> ArtifactFile:
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    return ArtifactFile(
        path=path.relative_to(folder).as_posix(),
        size_bytes=path.stat().st_size,
        sha256=digest.hexdigest(),
    )
