"""Opens a decoder's weights by their path, in any supported format."""

from pathlib import Path

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.gguf_header import KnownHeader
from nodeagent.engine.weights.gguf_parts import first_part
from nodeagent.engine.weights.quantised_folder import QuantisedFolder, quantisation_of
from nodeagent.engine.weights.safetensors_folder import SafetensorsFolder

Checkpoint = GgufFile | SafetensorsFolder


def open_checkpoint(path: Path, known: KnownHeader | None = None) -> Checkpoint:
    """Open a GGUF file, any part of a split one, or a folder with config.json or one GGUF model.

    `known` is the header of a GGUF file that was open before: only its weights can be read then.
    """
    try:
        path = _resolve(path)
        if not path.is_dir():
            return GgufFile(path, known)
        quantisation = quantisation_of(path)
        return QuantisedFolder(path, quantisation) if quantisation else SafetensorsFolder(path)
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}") from error


def _resolve(path: Path) -> Path:
    """Return the folder with config.json, or the (first) GGUF file, that `path` leads to."""
    if not path.exists():
        raise CheckpointError(f"cannot load {path}: no such file or folder")
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        # Some repositories have a subfolder for each quantisation.
        found = {first_part(file) for file in path.rglob("*.gguf")}
        if len(found) != 1:
            raise CheckpointError(
                f"cannot load {path}: it has no config.json, and {len(found)} models in .gguf files"
                " where one is expected"
            )
        return found.pop()
    if path.suffix != ".gguf":
        raise CheckpointError(f"cannot load {path}: neither a .gguf file nor a folder")
    return first_part(path)
