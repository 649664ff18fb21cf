"""The driver `command`: an operator's own server that speaks OpenAI's API.

The program is named in the configuration of the nodes (`[commands.NAME]`), because no deployment
may make a node run a program of its choice. The deployment names the model that it serves.
"""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine_capabilities import FEATURES, capabilities_of
from isochrone.wire.engines.shared_prompts import SHARED_CACHE_OPTION, shares_prompts
from isochrone.wire.models.model import EngineSettings

COMMAND_DRIVER: Final = "command"
NAME_OPTION: Final = "command"
SURFACES_OPTION: Final = "surfaces"
CONCURRENCY_OPTION: Final = "concurrency"
CONCURRENCY_MAX: Final = 4096
GENERATING: Final = frozenset({"chat", "completions"})


def surfaces_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the features that a deployment says its server has."""
    names = options.get(SURFACES_OPTION, "").split(",")
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def lacking_features_of(engine: EngineSettings) -> tuple[str, ...]:
    """Return the features that a deployment's engine lacks, in the order of FEATURES."""
    able = capabilities_of(engine.driver).features
    if engine.driver == COMMAND_DRIVER:
        able &= frozenset(surfaces_of(engine.options))
    return tuple(name for name in FEATURES if name not in able)


def command_problem(engine: EngineSettings) -> str:
    """Return why a deployment cannot use an operator's own server, or "" if it can.

    Other drivers have no such problem.
    """
    if engine.driver != COMMAND_DRIVER:
        return ""
    options = engine.options
    if not options.get(NAME_OPTION):
        return f"give --option {NAME_OPTION}=NAME, as in [commands.NAME] of the nodes"
    surfaces = surfaces_of(options)
    known = ", ".join(FEATURES)
    if not surfaces:
        return f"give --option {SURFACES_OPTION}= with what the server serves, of {known}"
    unknown = [name for name in surfaces if name not in FEATURES]
    if unknown:
        return f"surface {unknown[0][:40]!r} is unknown; use some of {known}"
    if GENERATING.intersection(surfaces) and not shares_prompts(engine):
        return (
            "a server of chats may answer one tenant from another's prompt cache; if the tenants"
            f" of this deployment may share one, give --option {SHARED_CACHE_OPTION}=true"
        )
    count = options.get(CONCURRENCY_OPTION, "1")
    if not 1 <= (parse_digits(count) or 0) <= CONCURRENCY_MAX:
        return f"{CONCURRENCY_OPTION} is {count[:20]!r}, expected 1 to {CONCURRENCY_MAX}"
    return ""
