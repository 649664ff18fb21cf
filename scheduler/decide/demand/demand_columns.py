"""Reads demand rows as columns: a large fleet has hundreds of thousands of rows.

Reading the attributes of each row took a quarter of a plan. Instead, rows are encoded as msgpack,
in one pass of C. Where all have the same length, because deployments and cities have names of one
length, the encoding is a table that numpy reads as it is. Otherwise each row is read.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.cluster import RATES, DemandRate

NAME: Final = attrgetter("deployment_id")
POP: Final = attrgetter("pop")
ALL_RATES: Final = attrgetter(*RATES)

FLOAT: Final = 0xCB
STRING: Final = 0xA0
STRING_BYTES_MAX: Final = 31
"""In msgpack, the byte before a float, and that before a string of up to 31 bytes less its size."""

CHUNK: Final = 4_096
"""Rows encoded at once: half a megabyte, which stays in a processor's cache."""

NAMES: Final = ("deployment_id", "pop")
ENCODER: Final = msgspec.msgpack.Encoder()


class DemandColumns(NamedTuple):
    """The columns of demand rows: the number of the deployment among `names`, the number of the
    city or -1, and each of RATES."""

    names: Sequence[DeploymentId]
    number: Ints
    city: Ints
    rates: Sequence[Floats]


def read_columns(rows: Sequence[DemandRate], index: Mapping[PopId, int]) -> DemandColumns:
    """Return the columns of rows; `index` numbers the cities."""
    columns = _read_table(rows) if rows else None
    if columns is None:
        return _read_rows(rows, index)
    names: defaultdict[DeploymentId, int] = defaultdict(count().__next__)
    number = _numbers(columns["deployment_id"], lambda name: names[DeploymentId(name)])
    city = _numbers(columns["pop"], lambda pop: index.get(PopId(pop), -1))
    return DemandColumns(list(names), number, city, [columns[rate] for rate in RATES])


def _read_rows(rows: Sequence[DemandRate], index: Mapping[PopId, int]) -> DemandColumns:
    names: defaultdict[DeploymentId, int] = defaultdict(count().__next__)
    number = np.fromiter(map(names.__getitem__, map(NAME, rows)), np.int64, len(rows))
    city = np.fromiter(map(index.get, map(POP, rows), repeat(-1)), np.int64, len(rows))
    flat = chain.from_iterable(map(ALL_RATES, rows))
    rates = np.fromiter(flat, np.float64, len(rows) * len(RATES)).reshape(-1, len(RATES)).T
    return DemandColumns(list(names), number, city, list(rates))


def _read_table(rows: Sequence[DemandRate]) -> "dict[str, np.ndarray[Any, Any]] | None":
    """Return the fields of all rows as arrays; None if their encodings differ in length.

    Each row begins where the one before it ends. So if the first begins at its place, and all have
    names of the same lengths and plain floats, all are at their places.
    """
    row = rows[0]
    sizes = {name: len(getattr(row, name).encode()) for name in NAMES}
    if not all(1 <= size <= STRING_BYTES_MAX for size in sizes.values()):
        return None
    markers = {name: STRING + size for name, size in sizes.items()} | dict.fromkeys(RATES, FLOAT)
    layout = _layout_of(sizes)
    columns: dict[str, np.ndarray[Any, Any]] = {
        name: np.empty(len(rows), np.float64 if name in RATES else layout[name]) for name in markers
    }
    data = bytearray()
    for begin in range(0, len(rows), CHUNK):
        part = rows[begin : begin + CHUNK]
        try:
            ENCODER.encode_into(part, data)
        except TypeError:  # a number that is not a plain one, as numpy's are
            return None
        header = 1 if len(part) < 16 else 3
        if len(data) != header + len(part) * layout.itemsize:
            return None
        table = np.frombuffer(data, layout, offset=header)
        if not all((table[f"{name}_marker"] == mark).all() for name, mark in markers.items()):
            return None
        for name, column in columns.items():
            column[begin : begin + len(part)] = table[name]
        del table  # which would keep `data` from being resized
    return columns


def _layout_of(sizes: Mapping[str, int]) -> "np.dtype[np.void]":
    """Return the layout of an encoded row whose names have these sizes: a header, and for each
    field its key, a marker and its value."""
    names, formats, offsets, offset = [], [], [], 1
    for field in DemandRate.__struct_fields__:
        offset += 1 + len(field)
        kind = ">f8" if field in RATES else f"S{sizes[field]}"
        names += [f"{field}_marker", field]
        formats += ["u1", kind]
        offsets += [offset, offset + 1]
        offset += 1 + sizes.get(field, 8)
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": offset}
    dtype: np.dtype[np.void] = np.dtype(layout)
    return dtype


def _numbers(column: "np.ndarray[Any, Any]", number_of: Callable[[str], int]) -> Ints:
    """Return the number of each string of a column; `number_of` is called for each that differs
    where they come in runs or are short, else for each."""
    begins = np.append(0, np.flatnonzero(column[1:] != column[:-1]) + 1)
    if len(begins) < len(column) // 8:
        values = column[begins].tolist()
        places = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(column))))
    elif column.itemsize <= 8:
        keys = column.astype("S8").view(np.uint64)
        distinct = np.unique(keys)
        values, places = distinct.view("S8").tolist(), np.searchsorted(distinct, keys)
    else:
        values, places = column.tolist(), np.arange(len(column))
    numbers: Ints = np.array([number_of(value.decode()) for value in values], np.int64)[places]
    return numbers
