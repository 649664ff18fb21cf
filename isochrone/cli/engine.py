"""The engine options that `deploy` and `rollouts start` share."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option("--driver", help="embedded, mock, vllm, sglang or tensorrt_llm."),
    click.option(
        "--option",
        "options",
        multiple=True,
        help="Engine option, as name=value; repeat it. name= removes one.",
    ),
    click.option(
        "--context-tokens",
        "context_tokens_max",
        type=int,
        help="Most tokens of a prompt and its answer together.",
    ),
    click.option(
        "--kv-bytes", "kv_memory_bytes", type=int, help="Memory for KV cache on each device."
    ),
    click.option(
        "--tokens-in-flight",
        "tokens_in_flight_max",
        type=int,
        help="Most tokens that a replica admits at once.",
    ),
    click.option("--devices", type=int, help="GPUs per replica; the engine is split over them."),
    click.option("--nodes", type=int, help="Nodes of one PoP to spread these GPUs over evenly."),
)
_FIELDS: Final = (
    *("driver", "context_tokens_max", "kv_memory_bytes", "tokens_in_flight_max"),
    *("devices", "nodes"),
)


def engine_options(command: F) -> F:
    """Give a command the options of an engine."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_of(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings: what is given, else what they were."""
    named = {name: given[name] for name in _FIELDS if given[name] is not None}
    options = {**before.get("options", {}), **dict(_pair(option) for option in given["options"])}
    kept = {name: value for name, value in options.items() if value}
    return {**before, **named, "options": kept}


def _pair(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals:
        raise click.UsageError(f"cannot read the option {option!r}: write name=value")
    return name, value
