"""Prints data to standard output, as a table or JSON, and messages to standard error."""

import errno
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

# Reasons quote the logs of engines, in which `[rank0]` and `[/x]` are text.
AS_WRITTEN: Final[Mapping[str, Any]] = {"markup": False, "emoji": False, "highlight": False}

stderr = Console(stderr=True, soft_wrap=True, **AS_WRITTEN)

PIPED_COLUMNS: Final = 1000
"""Table width if the output is not a terminal: lines must not be folded for another program."""


UNITS: Final = {"_per_s": "/s", "_s": " (s)", "_ms": " (ms)", "_mib": " (MiB)"}
"""How the end of a column's name is written in its heading."""

OBJECT_CHARS_MAX: Final = 80
"""An object that would be a longer line has a line for each field."""


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: str) -> None:
    """Print rows: the named columns as a table, or all fields as JSON."""
    if output == "json":
        _print_json(list(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = _are_numbers(column, (row.get(column) for row in rows))
        table.add_column(heading(column), overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(cell(row.get(column), column) for column in columns))
    _print_table(table)


def show_one(row: Mapping[str, Any], output: str) -> None:
    """Print one object: a line per field, per item of a list and per field of a long object; or
    JSON."""
    if output == "json":
        _print_json(row)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in row.items():
        for label, text in _lines(name, value):
            table.add_row(label, text)
    _print_table(table)


def _lines(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each line of a field."""
    if isinstance(value, dict) and len(cell(value)) > OBJECT_CHARS_MAX:
        yield name, ""
        for field, inner in value.items():
            for label, text in _lines(field, inner):
                yield f"  {label}", text
        return
    items = value if isinstance(value, list) and value else [value]
    for number, item in enumerate(items):
        yield "" if number else name, cell(item, name)


def heading(column: str) -> str:
    """Return the heading of a column, with its unit: `SILENT (s)` of `silent_s`."""
    ending = next((ending for ending in UNITS if column.endswith(ending)), "")
    return column.removesuffix(ending).upper().replace("_", " ") + UNITS.get(ending, "")


def _are_numbers(column: str, values: Iterable[Any]) -> bool:
    """Return whether a column has only numbers; those of times are none."""
    kinds = {type(value) for value in values if value is not None}
    return bool(kinds) and kinds <= {int, float} and not _is_time(column)


def _is_time(name: str) -> bool:
    return name == "at" or name.endswith("_at")


def cell(value: Any, name: str = "") -> str:
    """Format one value for a table. Values named `at` or `..._at` are Unix times, 0 for none."""
    if value in (None, "", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{field}={_nested(inner, field)}" for field, inner in value.items())
    if isinstance(value, list):
        return "; ".join(cell(inner) for inner in value)
    if isinstance(value, int | float) and _is_time(name):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%SZ}" if value else "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _nested(value: Any, name: str) -> str:
    """Format a value inside another one; nested objects and lists are put in parentheses."""
    has_parts = isinstance(value, dict | list) and len(value) > 0
    return f"({cell(value, name)})" if has_parts else cell(value, name)


def _print_table(table: Table) -> None:
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    console = Console(file=sys.stdout, width=width, **AS_WRITTEN)
    with console.capture() as captured:
        console.print(table)
    _echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_json(data: Any) -> None:
    _echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def _echo(text: str) -> None:
    try:
        click.echo(text)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends quietly when the reader of a pipe has gone
        raise click.ClickException(f"cannot write the output: {error.strerror}") from error
