"""Mistral: a Llama whose tokens see a window back (`ModelShape.window_tokens`), not everything."""

from nodeagent.engine.model.llama import Llama


class Mistral(Llama):
    """The window is in the shape, and the step's masks follow it; the weights are a Llama's."""
