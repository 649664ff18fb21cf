"""KV that the replicas of a PoP share through a vendor's store, which their engines belong to."""

from typing import Final

from isochrone.wire.engines.engine_capabilities import ENGINE_CAPABILITIES, MIB, capabilities_of
from isochrone.wire.models.model import EngineSettings

STORE_BYTES_OPTION: Final = "kv_store_bytes"
STORE_BYTES: Final = 1024 * MIB
"""The host memory that each replica gives to the store, unless its deployment says otherwise."""
STORE_BUFFER_BYTES: Final = 128 * MIB
"""The host memory that a replica's own client of the store takes besides."""


def uses_kv_store(engine: EngineSettings) -> bool:
    """Return whether replicas share KV through a vendor's store, not over the nodes' API."""
    return engine.share_kv and bool(capabilities_of(engine.driver).kv_store)


def store_bytes(engine: EngineSettings) -> int:
    """Return the host memory that a replica takes for the store, 0 without one."""
    if not uses_kv_store(engine):
        return 0
    given = engine.options.get(STORE_BYTES_OPTION, "")
    return (int(given) if given else STORE_BYTES) + STORE_BUFFER_BYTES


def sharing_problem(engine: EngineSettings) -> str:
    """Return why replicas of this engine cannot share KV; "" if they can, or need not."""
    one = capabilities_of(engine.driver)
    if not engine.share_kv:
        if STORE_BYTES_OPTION in engine.options:
            return f"{STORE_BYTES_OPTION} is for replicas that share KV: add share_kv"
        return ""
    if not one.shares_kv:
        known = ", ".join(name for name, able in ENGINE_CAPABILITIES.items() if able.shares_kv)
        return f"share_kv needs an engine that sends KV: {engine.driver} does not, {known} do"
    if uses_kv_store(engine):
        for name in (one.transfer_option, "kv_transfer_config"):
            if name in engine.options:
                return (
                    f"share_kv makes a kv_transfer_config of its own ({one.kv_store}): leave"
                    f" {name} out"
                )
        if engine.nodes > 1:
            return f"share_kv of {engine.driver} needs replicas of one node each"
    return ""
