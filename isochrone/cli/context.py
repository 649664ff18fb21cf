"""The context that click passes to every command."""

from typing import NamedTuple

from isochrone.cli.client import AdminClient


class CliContext(NamedTuple):
    """The admin API client, and the output format: `table` or `json`."""

    api: AdminClient
    output: str
