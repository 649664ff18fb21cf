"""Artifacts are named by their content: the digest of a manifest, and what a manifest may hold."""

import hashlib
from collections.abc import Iterable
from typing import Final

from isochrone.wire.model import Artifact, ArtifactFile

SCHEMES: Final = ("pypi:", "hf:", "https:", "http:", "file:")
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def manifest_digest(files: Iterable[ArtifactFile]) -> str:
    """Return the SHA-256 over the sorted lines `sha256  size  path`."""
    lines = sorted(f"{file.sha256}  {file.size_bytes}  {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_path(path: str) -> str:
    """Say in words what is wrong with a file's path below its artifact's folder; "" if nothing."""
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path:
        return f"cannot take file {path!r}: the path must be relative, with / between its parts"
    if any(part in ("", ".", "..") for part in parts):
        return f"cannot take file {path!r}: the path leaves its folder or has an empty part"
    if path.lower().endswith(PICKLES):
        return f"cannot take file {path!r}: pickles run code when read; use safetensors or GGUF"
    return ""


def check_artifact(artifact: Artifact) -> str:
    """Say in words what is wrong with an artifact; "" if nothing."""
    if not artifact.source.startswith(SCHEMES):
        return f"cannot fetch from {artifact.source[:80]!r}: give one of {', '.join(SCHEMES)}"
    for file in artifact.files:
        problem = check_path(file.path)
        if problem:
            return problem
    if len({file.path for file in artifact.files}) != len(artifact.files):
        return "cannot take the artifact: a path is listed twice"
    if manifest_digest(artifact.files) != artifact.digest:
        return f"cannot take the artifact: its digest should be {manifest_digest(artifact.files)}"
    return ""
