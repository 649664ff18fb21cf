"""What every command is given: the API client, and how to print."""

from typing import NamedTuple

from isochrone.cli.client import AdminClient


class CliContext(NamedTuple):
    """Handed to each command by click."""

    api: AdminClient
    output: str
