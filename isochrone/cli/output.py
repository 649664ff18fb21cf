"""Data on standard output, as a table or JSON; chatter on standard error."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

chatter = Console(stderr=True, highlight=False)


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: str) -> None:
    """Print rows: the named columns as a table, or everything as JSON."""
    if output == "json":
        _print_json(list(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper().replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    Console(file=sys.stdout, highlight=False).print(table)


def show_one(row: Mapping[str, Any], output: str) -> None:
    """Print one thing: a line a field, or JSON."""
    if output == "json":
        _print_json(row)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name, cell(value))
    Console(file=sys.stdout, highlight=False).print(table)


def cell(value: Any) -> str:
    """Write one value for a person."""
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={cell(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(cell(inner) for inner in value)
    return str(value)


def _print_json(data: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
