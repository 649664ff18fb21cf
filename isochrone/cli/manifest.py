"""Making a model's catalogue entry from its files: sizes, digests, and what its config says."""

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.wire.artifact import check_path, manifest_digest
from isochrone.wire.model import Artifact, ArtifactFile
from isochrone.wire.model_shape import BadConfig, kv_bytes_per_token, shape_of

READ_BYTES: Final = 4 * 1024 * 1024
HIDDEN: Final = (".", "__pycache__")
"""Also of folders: what a download or git keeps beside the files is no part of the model."""
KINDS: Final = {"BertModel": "embedding", "BertForSequenceClassification": "rerank"}
"""What architectures that read and write nothing are for; all others chat."""


class _Named(msgspec.Struct):
    architectures: tuple[str, ...] | None = None
    max_position_embeddings: int = 4096


class ManifestError(Exception):
    """The folder cannot be made a catalogue entry; the message says why."""


def artifact_of(folder: Path, source: str, only: tuple[str, ...] = ()) -> Artifact:
    """Read every file below `folder` (or `only` those named) and return the artifact."""
    if not folder.is_dir():
        raise ManifestError(f"cannot read {folder}: no such folder")
    paths = [folder / name for name in only] or [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(HIDDEN) for part in path.relative_to(folder).parts)
    ]
    files = tuple(_file(folder, path) for path in paths)
    if not files:
        raise ManifestError(f"cannot use {folder}: there is no file in it")
    for file in files:
        problem = check_path(file.path)
        if problem:
            raise ManifestError(problem)
    return Artifact(source=source, files=files, digest=manifest_digest(files))


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what a Hugging Face config.json says of the model; {} where there is none."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        named = msgspec.convert(config, _Named)
    except msgspec.DecodeError as error:
        raise ManifestError(f"cannot read {path}: {error}") from error
    architecture = (named.architectures or ("unknown",))[0]
    facts = {
        "architecture": architecture,
        "kind": KINDS.get(architecture, "chat"),
        "context_tokens": named.max_position_embeddings,
    }
    if facts["kind"] != "chat":
        return facts
    try:
        shape = shape_of(config)
    except BadConfig as error:
        raise ManifestError(f"{error}, in {path}") from error
    return {
        **facts,
        "kv_bytes_per_token": int(kv_bytes_per_token(shape)),
        "shape": msgspec.to_builtins(shape),
    }


def _file(folder: Path, path: Path) -> ArtifactFile:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as opened:
            while chunk := opened.read(READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    return ArtifactFile(
        path=path.relative_to(folder).as_posix(),
        size_bytes=path.stat().st_size,
        sha256=digest.hexdigest(),
    )
