"""Content addressing of artifacts: a manifest's digest, and which manifests are valid."""

import hashlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Final

from isochrone.wire.models.model import Artifact, ArtifactFile

SCHEMES: Final = ("pypi:", "hf:", "https:", "http:", "file:")
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
HIDDEN: Final = (".", "__pycache__")
"""Prefixes of files and folders that downloads and git create; they are not part of the model."""


def manifest_digest(files: Iterable[ArtifactFile]) -> str:
    """Return the SHA-256 of the sorted lines `sha256  size  path`."""
    lines = sorted(f"{file.sha256}  {file.size_bytes}  {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_path(path: str) -> str:
    """Return what is wrong with a file's path below its artifact's folder, or ""."""
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path:
        return f"cannot accept file {path!r}: the path must be relative, with / as separator"
    if any(part in ("", ".", "..") for part in parts):
        return f"cannot accept file {path!r}: the path leaves its folder or has an empty part"
    if path.lower().endswith(PICKLE_SUFFIXES):
        return f"cannot accept file {path!r}: a pickle can run code; use safetensors or GGUF"
    return ""


def is_hidden(path: PurePath) -> bool:
    """Return True if a file below a model's folder is not part of the model."""
    return any(part.startswith(HIDDEN) for part in path.parts)


def check_artifact(artifact: Artifact, schemes: tuple[str, ...] = SCHEMES) -> str:
    """Return what is wrong with an artifact, or ""."""
    if not artifact.source.startswith(schemes):
        return f"cannot fetch from {artifact.source[:80]!r}: use one of {', '.join(SCHEMES)}"
    for file in artifact.files:
        problem = check_path(file.path)
        if problem:
            return problem
    if len({file.path for file in artifact.files}) != len(artifact.files):
        return "cannot accept the artifact: a path is listed twice"
    if manifest_digest(artifact.files) != artifact.digest:
        return f"cannot accept the artifact: its digest must be {manifest_digest(artifact.files)}"
    return ""
