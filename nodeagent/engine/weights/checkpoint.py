"""Opening a decoder by its path, whichever kind of file it is."""

from pathlib import Path

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.gguf import GgufFile
from nodeagent.engine.weights.gguf_parts import first_of
from nodeagent.engine.weights.quantised_folder import QuantisedFolder, quantisation_of
from nodeagent.engine.weights.safetensors import SafetensorsFolder

Checkpoint = GgufFile | SafetensorsFolder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, any part of one, or a folder of config.json or exactly one GGUF model."""
    try:
        path = _place(path)
        if not path.is_dir():
            return GgufFile(path)
        quantisation = quantisation_of(path)
        return QuantisedFolder(path, quantisation) if quantisation else SafetensorsFolder(path)
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}") from error


def _place(path: Path) -> Path:
    """Return the (first) GGUF file, or the folder with a config.json, that `path` leads to."""
    if not path.exists():
        raise CheckpointError(f"cannot load {path}: no such file or folder")
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        # Some repositories have a folder for each quantisation.
        found = {first_of(file) for file in path.rglob("*.gguf")}
        if len(found) != 1:
            raise CheckpointError(
                f"cannot load {path}: neither config.json nor exactly one model in .gguf files in"
                f" it, but {len(found)}"
            )
        return found.pop()
    if path.suffix != ".gguf":
        raise CheckpointError(f"cannot load {path}: neither a .gguf file nor a folder")
    return first_of(path)
