"""Commands that ask one thing of the admin API and print the answer: a line each."""

from collections.abc import Sequence

import click

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.output import chatter, show_one, show_rows


def list_command(name: str, path: str, columns: Sequence[str], words: str) -> click.Command:
    """Return a command that lists what is at a path."""

    @click.command(name, help=words)
    @click.pass_obj
    def command(obj: CliContext) -> None:
        show_rows(obj.api.list(path), columns, obj.output)

    return command


def add_command(
    group: click.Group, name: str, method: str, path: str, words: str, done: str = ""
) -> None:
    """Give a group a command about one thing, which the path has in braces: `/v1/pops/{pop}`.

    It shows the answer, or says only that it is `done`, in which fields of the answer may stand.
    """
    before, _, rest = path.partition("{")
    thing, _, after = rest.partition("}")

    @group.command(name, help=words)
    @click.argument("thing", metavar=thing.upper())
    @click.pass_obj
    def command(obj: CliContext, thing: str) -> None:
        answer = obj.api.ask(method, f"{before}{segment(thing)}{after}")
        if done:
            chatter.print(done.format(thing, **(answer or {})))
        else:
            show_one(answer, obj.output)
