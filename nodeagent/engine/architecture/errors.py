"""The error for model files that cannot be used."""


class CheckpointError(Exception):
    """A model file cannot be used; the message names the file and the reason."""


class MemoryShortage(CheckpointError):
    """A device has no memory for a model at present. Nothing was loaded."""
