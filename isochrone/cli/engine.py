"""The engine options of `deploy` and `rollouts start`."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.models.model import EngineSettings

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option(
        "--driver",
        help="Engine: embedded, mock, vllm, llama_cpp, sglang, tensorrt_llm, or command (a server"
        " of your own).",
    ),
    click.option(
        "--option",
        "options",
        multiple=True,
        help="Engine option as name=value; repeatable. name= removes it, or sets a flag.",
    ),
    click.option(
        "--context-tokens",
        "context_tokens_max",
        type=int,
        help="Maximum tokens of a prompt and its answer together.",
    ),
    click.option(
        "--kv-bytes",
        "kv_memory_bytes",
        type=int,
        help="Memory for KV cache on each device; 0 (the default) for what is left of the device.",
    ),
    click.option(
        "--tokens-in-flight",
        "tokens_in_flight_max",
        type=int,
        help="Maximum tokens in flight on one replica; 0 (the default) follows from its KV cache.",
    ),
    click.option("--devices", type=int, help="GPUs per replica."),
    click.option(
        "--nodes",
        type=int,
        help="Nodes per replica, in one PoP, each with the same number of GPUs.",
    ),
    click.option(
        "--share-kv/--no-share-kv",
        "share_kv",
        default=None,
        help="Let the replicas of a PoP use each other's KV of prompts: embedded over the nodes'"
        " API, vllm through Mooncake Store.",
    ),
)
_FIELDS: Final = (
    *("driver", "context_tokens_max", "kv_memory_bytes", "tokens_in_flight_max"),
    *("devices", "nodes", "share_kv"),
)


def engine_options(command: F) -> F:
    """Add the engine options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_of(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine settings `before`, updated with the options that are given."""
    settings = {name: given[name] for name in _FIELDS if given[name] is not None}
    options = {
        **before.get("options", {}),
        **dict(_parse_option(option) for option in given["options"]),
    }
    driver = settings.get("driver") or before.get("driver") or EngineSettings().driver
    kept_options = {
        name: value or "true" for name, value in options.items() if value or _is_flag(driver, name)
    }
    return {**before, **settings, "options": kept_options}


def _is_flag(driver: str, name: str) -> bool:
    known = ENGINE_OPTIONS.get(driver)
    return known is not None and known.is_flag(name)


def _parse_option(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals:
        raise click.UsageError(f"cannot read option {option!r}: write it as name=value")
    return name, value
