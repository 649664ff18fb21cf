"""Opens the vocabulary of a checkpoint, whichever kind of file it is."""

from nodeagent.engine.tokenizer.gguf_tokenizer import read_gguf_vocabulary
from nodeagent.engine.tokenizer.hf_tokenizer import read_folder_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint
from nodeagent.engine.weights.gguf_file import GgufFile


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Return the checkpoint's vocabulary, or raise CheckpointError."""
    if isinstance(checkpoint, GgufFile):
        return read_gguf_vocabulary(checkpoint.path, checkpoint.metadata)
    return read_folder_vocabulary(checkpoint.folder, checkpoint.config)
