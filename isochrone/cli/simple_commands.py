"""Builds commands that send one request to the admin API and print the answer."""

from collections.abc import Sequence
from typing import Any

import click

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.output import show_one, show_rows, stderr


def list_command(name: str, path: str, columns: Sequence[str], help_text: str) -> click.Command:
    """Return a command that prints the list at a path of the admin API."""

    @click.command(name, help=help_text)
    @click.pass_obj
    def command(obj: CliContext) -> None:
        show_rows(obj.api.list(path), columns, obj.output)

    return command


def list_of_deployment(obj: CliContext, path: str, deployment: str | None) -> list[dict[str, Any]]:
    """Return the rows of a list, of one deployment or of all. Raises AdminError.

    A deployment that has no rows must exist: else a wrong name would look like an empty list.
    """
    rows = obj.api.list(path, {"deployment_id": deployment} if deployment else None)
    if deployment and not rows:
        obj.api.ask("GET", f"/v1/deployments/{segment(deployment)}")
    return rows


def add_command(
    group: click.Group, name: str, method: str, path: str, help_text: str, done: str = ""
) -> None:
    """Add a command to a group that requests one object, named in braces: `/v1/pops/{pop}`.

    The command prints the answer. With `done`, it prints that message to standard error instead:
    `{}` stands for the object's name and `{field}` for a field of the answer.
    """
    before, _, rest = path.partition("{")
    thing, _, after = rest.partition("}")

    @group.command(name, help=help_text)
    @click.argument("thing", metavar=thing.upper())
    @click.pass_obj
    def command(obj: CliContext, thing: str) -> None:
        answer = obj.api.ask(method, f"{before}{segment(thing)}{after}")
        if done:
            stderr.print(done.format(thing, **(answer or {})))
        else:
            show_one(answer, obj.output)
