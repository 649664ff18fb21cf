"""Decides how long a step of a vendor engine may take before the engine counts as hung.

On a processor, a step full of prompts may take longer than the node's `stall_s`: 2,048 tokens at
122 tokens/s take 17 s. A vendor engine says nothing within a step, so its length is estimated from
the most tokens that a step reads and from the speed at which the engine read a prompt of known
length after its start. The embedded engine counts layers, and needs no such limit.
"""

from typing import Final

from isochrone.wire.engines.engine_capabilities import capabilities_of
from isochrone.wire.engines.engine_options import read_size
from isochrone.wire.models.model import EngineSettings

MARGIN: Final = 3.0
"""How many times slower a step may be than the measurement: other work on the machine, and long
contexts, whose attention costs more."""

LIMIT_S_MAX: Final = 600.0
"""The most that is allowed to an engine, however slowly it read the prompt."""

STEP_TOKENS_DEFAULT: Final = 2048
"""Tokens of a step without the option: the default of vLLM on processors. Devices that have a
larger one read it within the node's `stall_s`."""

COUNTS_LAYERS: Final = frozenset({"embedded"})


def step_tokens_max(engine: EngineSettings) -> int:
    """Return the most tokens that a step of a vendor engine reads; 0 for other engines."""
    name = capabilities_of(engine.driver).step_tokens_option
    if not name or engine.driver in COUNTS_LAYERS:
        return 0
    return read_size(engine.options.get(name, "")) or STEP_TOKENS_DEFAULT


def step_limit_s(step_tokens: int, prefill_tokens_per_s: float) -> float:
    """Return how long the longest step may take; 0 if a speed is unknown or nothing is read."""
    if step_tokens <= 0 or prefill_tokens_per_s <= 0:
        return 0.0
    return min(LIMIT_S_MAX, MARGIN * step_tokens / prefill_tokens_per_s)
