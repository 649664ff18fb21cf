"""Mistral: a Llama with a sliding window."""

from nodeagent.engine.model.llama import Llama


class Mistral(Llama):
    """The window is in the shape, and the attention backend follows it."""
