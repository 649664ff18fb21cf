"""What is said of an engine, alike for a deployment and for its next version."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FIELDS: Final = {
    "driver": "driver",
    "context_tokens": "context_tokens_max",
    "kv_bytes": "kv_memory_bytes",
    "devices": "devices",
    "nodes": "nodes",
}
"""What each option sets of the engine's settings."""


def engine_options(command: F) -> F:
    """Give a command the options of an engine."""
    for option in (
        click.option("--nodes", type=int, help="Nodes of one PoP that these GPUs are on."),
        click.option(
            "--devices", type=int, help="GPUs of a replica; its engine is split over them."
        ),
        click.option("--kv-bytes", type=int, help="Memory for KV on each device."),
        click.option("--context-tokens", type=int, help="The longest prompt and answer together."),
        click.option(
            "--option",
            "options",
            multiple=True,
            help="Engine option, as name=value; those given are all that it has.",
        ),
        click.option("--driver", help="embedded, mock, vllm, sglang or tensorrt_llm."),
    ):
        command = option(command)
    return command


def engine_of(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings: what is given, else what they were."""
    engine = {**before}
    engine |= {field: given[name] for name, field in FIELDS.items() if given[name] is not None}
    if given["options"]:
        engine["options"] = dict(_pair(option) for option in given["options"])
    return engine


def _pair(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals:
        raise click.UsageError(f"cannot read the option {option!r}: write name=value")
    return name, value
