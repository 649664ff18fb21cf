"""A server that the operator of a node lets deployments start: `[commands.NAME]` of node.toml."""

import shutil
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

PORT: Final = "{port}"
PLACEHOLDERS: Final = (PORT, "{model}", "{name}", "{threads}")
"""The port to listen on, the model's folder, the deployment's name, and how many threads to use."""

Path = Annotated[str, msgspec.Meta(pattern="^/")]


class ConfiguredCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program, and how it is used.

    `arguments` may contain PLACEHOLDERS, and must contain the port: the server listens on
    127.0.0.1. The server is ready when `ready_path` answers 200. `model_name` is the `model` of
    requests to it, and may contain placeholders. A request may go on for `stall_s` without a byte
    of its answer; then the server is restarted.
    """

    arguments: tuple[str, ...]
    ready_path: Path = "/health"
    metrics_path: Annotated[str, msgspec.Meta(pattern="^(/|$)")] = ""
    model_name: str = "{name}"
    stall_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not any(PORT in argument for argument in self.arguments[1:]):
            raise ValueError(
                f"cannot use the command {' '.join(self.arguments)[:200]!r}: no argument after the"
                f" program has {PORT}"
            )

    def missing(self) -> str:
        """Return an error message if the program is not there, else ""."""
        program = self.arguments[0]
        return "" if shutil.which(program) else f"there is no program {program!r} on this node"


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced. Other braces stay."""
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
