"""KV that the replicas of a PoP share through a vendor's store, which their engines belong to."""

from typing import Final

from isochrone.wire.engines.engine_capabilities import ENGINE_CAPABILITIES, MIB, capabilities_of
from isochrone.wire.models.model import EngineSettings

STORE_BYTES_OPTION: Final = "kv_store_bytes"
STORE_BYTES: Final = 1024 * MIB
"""The host memory that each replica gives to the store, unless its deployment says otherwise."""
STORE_BUFFER_BYTES: Final = 128 * MIB
"""The host memory that a replica's own client of the store takes besides."""
MEMBER_TTL_S: Final = 5
"""An engine that is silent for this long has left the store, and its blocks with it."""
STORE_COPIES: Final = 2
"""The copies that the embedded engine has the store keep of each block, each in the memory of
another engine where there are so many: so a block outlives one of them."""


def uses_kv_store(engine: EngineSettings) -> bool:
    """Return whether replicas share KV through a vendor's store.

    Those of an engine that also shares it over the nodes' API do so if their deployment says how
    much memory each gives to the store.
    """
    capabilities = capabilities_of(engine.driver)
    if not engine.share_kv or not capabilities.kv_store:
        return False
    return not capabilities.kv_store_by_option or STORE_BYTES_OPTION in engine.options


def store_bytes(engine: EngineSettings) -> int:
    """Return the host memory that a replica takes for the store, 0 without one."""
    if not uses_kv_store(engine):
        return 0
    option = engine.options.get(STORE_BYTES_OPTION, "")
    return (int(option) if option else STORE_BYTES) + STORE_BUFFER_BYTES


def sharing_problem(engine: EngineSettings) -> str:
    """Return why replicas of this engine cannot share KV; "" if they can, or need not."""
    capabilities = capabilities_of(engine.driver)
    if not engine.share_kv:
        if STORE_BYTES_OPTION in engine.options:
            return f"{STORE_BYTES_OPTION} is for replicas that share KV: add share_kv"
        return ""
    if not capabilities.shares_kv:
        known = ", ".join(name for name, each in ENGINE_CAPABILITIES.items() if each.shares_kv)
        return f"share_kv needs an engine that sends KV: {engine.driver} does not, {known} do"
    if uses_kv_store(engine):
        for name in (capabilities.transfer_option, "kv_transfer_config"):
            if name and name in engine.options:
                return (
                    f"share_kv makes a kv_transfer_config of its own ({capabilities.kv_store}):"
                    f" leave {name} out"
                )
        if engine.nodes > 1:
            return f"{store_use(engine)} needs replicas of one node each"
    return ""


def store_use(engine: EngineSettings) -> str:
    """Return in words the options that make replicas of this engine use a store."""
    by_option = capabilities_of(engine.driver).kv_store_by_option
    return f"share_kv of {engine.driver}" + (f" with {STORE_BYTES_OPTION}" if by_option else "")
