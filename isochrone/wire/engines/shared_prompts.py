"""Engines whose tenants share prompts only if their deployment says that they may.

llama.cpp's speculative decoding may draft from what other requests have said. Drafts that were
accepted make an answer faster, and its `timings` count them, so a tenant could find out which texts
other tenants have sent or got.
"""

from typing import Final

from isochrone.wire.engines.engine_capabilities import TRUE_VALUES
from isochrone.wire.models.model import EngineSettings

SHARED_CACHE_OPTION: Final = "shared_prompt_cache"
"""An option of our drivers, which no engine gets."""

DRAFTS_OPTION: Final = "spec_type"
OWN_DRAFTS: Final = frozenset(
    {
        *("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"),
        "ngram-simple",
    }
)
"""llama.cpp's kinds of drafts (`common/speculative.cpp`) that are made by a model, or from the text
of the request itself. The others keep n-grams of earlier requests."""


def shares_prompts(engine: EngineSettings) -> bool:
    """Return whether a deployment says that its tenants may share a cache of prompts."""
    return engine.options.get(SHARED_CACHE_OPTION, "false").lower() in ("", *TRUE_VALUES)


def drafts_problem(engine: EngineSettings) -> str:
    """Return why a deployment's kinds of drafts cannot be used, or "" if they can.

    Other drivers than llama.cpp's have no such problem.
    """
    if engine.driver != "llama_cpp" or shares_prompts(engine):
        return ""
    kinds = [kind.strip() for kind in engine.options.get(DRAFTS_OPTION, "none").split(",")]
    shared = [kind for kind in kinds if kind not in OWN_DRAFTS]
    if not shared:
        return ""
    return (
        f"{DRAFTS_OPTION} {shared[0][:40]!r} is not one of {', '.join(sorted(OWN_DRAFTS))}; others"
        " draft one tenant's answer from another's texts; if the tenants of this deployment may"
        f" share them, give --option {SHARED_CACHE_OPTION}=true"
    )
