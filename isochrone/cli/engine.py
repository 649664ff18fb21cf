"""The options that say how a replica's engine is started, for whichever command brings one."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option("--driver", help="embedded, mock, vllm, sglang or tensorrt_llm."),
    click.option(
        "--option",
        "options",
        multiple=True,
        help="Engine option, as name=value; repeat it. name= takes one away.",
    ),
    click.option(
        "--context-tokens",
        "context_tokens_max",
        type=int,
        help="The longest prompt and answer together.",
    ),
    click.option("--kv-bytes", "kv_memory_bytes", type=int, help="Memory for KV on each device."),
    click.option(
        "--tokens-in-flight",
        "tokens_in_flight_max",
        type=int,
        help="Tokens that a replica takes in at once; more is another replica's.",
    ),
    click.option("--devices", type=int, help="GPUs of a replica; its engine is split over them."),
    click.option(
        "--nodes", type=int, help="Nodes of one PoP that these GPUs are on, as many on each."
    ),
)
_FIELDS: Final = (
    *("driver", "context_tokens_max", "kv_memory_bytes", "tokens_in_flight_max"),
    *("devices", "nodes"),
)


def engine_options(command: F) -> F:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_of(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as they are to be: what is not given stays as it is."""
    named = {name: given[name] for name in _FIELDS if given[name] is not None}
    options = dict(before.get("options", {}))
    for text in given["options"]:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"cannot read the option {text!r}: write name=value")
        options[name] = value
    kept = {name: value for name, value in options.items() if value}
    return {**before, **named, "options": kept}
