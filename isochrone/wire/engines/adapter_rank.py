"""Which deployments take adapters while they run, and up to which rank."""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine_capabilities import TRUE_VALUES, capabilities_of
from isochrone.wire.models.model import EngineSettings

LORA_OPTION: Final = "enable_lora"
RUNTIME_ADAPTER_ENGINES: Final[Mapping[str, int]] = {"embedded": 256, "vllm": 16}
"""The engines into which agents load adapters while they run, and the highest rank that each takes
without further options."""


CHAT_ADAPTER_ENGINES: Final = frozenset({"embedded"})
"""The engines that take adapters of chat models only."""


def adapter_rank_max(engine: EngineSettings, kind: str) -> int:
    """Return the highest rank of adapters that replicas with these settings take, 0 for none.

    `kind` is that of their model.
    """
    rank_max = RUNTIME_ADAPTER_ENGINES.get(engine.driver, 0)
    if not rank_max or (kind != "chat" and engine.driver in CHAT_ADAPTER_ENGINES):
        return 0
    if capabilities_of(engine.driver).adapters == "with_option":
        if engine.options.get(LORA_OPTION, "").lower() not in TRUE_VALUES:
            return 0
        rank = parse_digits(engine.options.get("max_lora_rank", ""))
        return rank_max if rank is None else rank
    return rank_max
