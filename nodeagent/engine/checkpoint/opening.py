"""Opening a model by its path, whichever kind of file it is."""

from pathlib import Path

from nodeagent.engine.checkpoint.gguf import GgufFile
from nodeagent.engine.checkpoint.quantised import QuantisedFolder, is_quantised
from nodeagent.engine.checkpoint.safetensors import SafetensorsFolder
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.vocabulary import Vocabulary, vocabulary_of_folder, vocabulary_of_gguf


def open_checkpoint(path: Path) -> tuple[GgufFile | SafetensorsFolder, Vocabulary]:
    """Open a GGUF file, or a folder that holds config.json or exactly one GGUF file."""
    source = open_weights(path)
    try:
        return source, read_vocabulary(path, source)
    except BaseException:
        source.close()
        raise


def open_weights(path: Path) -> GgufFile | SafetensorsFolder:
    """Open the same without its vocabulary."""
    try:
        path = _place(path)
        return _folder(path) if path.is_dir() else GgufFile(path)
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}") from error


def read_vocabulary(path: Path, source: GgufFile | SafetensorsFolder) -> Vocabulary:
    """Return the vocabulary of what was opened as `source`."""
    try:
        if isinstance(source, GgufFile):
            return vocabulary_of_gguf(path, source)
        return vocabulary_of_folder(path, source)
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}") from error


def _folder(path: Path) -> SafetensorsFolder:
    return QuantisedFolder(path) if is_quantised(path) else SafetensorsFolder(path)


def _place(path: Path) -> Path:
    """Return the GGUF file, or the folder with a config.json, that `path` leads to."""
    if not path.exists():
        raise CheckpointError(f"cannot load {path}: no such file or folder")
    if path.is_dir() and (path / "config.json").exists():
        return path
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise CheckpointError(
                f"cannot load {path}: neither config.json nor exactly one .gguf file in it"
            )
        path = found[0]
    if path.suffix != ".gguf":
        raise CheckpointError(f"cannot load {path}: neither a .gguf file nor a folder")
    return path
