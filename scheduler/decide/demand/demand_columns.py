"""Reads demand rows as columns: a large fleet has hundreds of thousands of rows.

Reading the attributes of each row took a quarter of a plan. Instead, all rows are encoded as
msgpack, in one pass of C. Where all have the same length, because deployments and cities have names
of one length, the encoding is a table that numpy reads as it is. Otherwise each row is read.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
"""The byte before a float in msgpack."""


class DemandColumns(NamedTuple):
    """The columns of demand rows: the number of the deployment among `names`, the number of the
    city or -1, and each of RATES."""

    names: Sequence[DeploymentId]
    number: Ints
    city: Ints
    rates: Sequence[Floats]


def read_columns(rows: Sequence[DemandRate], index: Mapping[PopId, int]) -> DemandColumns:
    """Return the columns of rows; `index` numbers the cities."""
    table = _table_of(rows) if rows else None
    return _read_rows(rows, index) if table is None else _read_table(table, index)


def _read_rows(rows: Sequence[DemandRate], index: Mapping[PopId, int]) -> DemandColumns:
    names: defaultdict[DeploymentId, int] = defaultdict(count().__next__)
    number = np.fromiter(map(names.__getitem__, map(NAME, rows)), np.int64, len(rows))
    city = np.fromiter(map(index.get, map(POP, rows), repeat(-1)), np.int64, len(rows))
    flat = chain.from_iterable(map(ALL_RATES, rows))
    rates = np.fromiter(flat, np.float64, len(rows) * len(RATES)).reshape(-1, len(RATES)).T
    return DemandColumns(list(names), number, city, list(rates))


def _table_of(rows: Sequence[DemandRate]) -> "np.ndarray[Any, Any] | None":
    """Return the encoding of all rows as records of equal length; None if they differ in length.

    Each row begins where the one before it ends. So if the first begins at its place, and all have
    the lengths of its names and plain floats, all are at their places.
    """
    try:
        data = msgspec.msgpack.encode(rows)
    except TypeError:  # a number that is not a plain one, as numpy's are
        return None
    header = 1 if len(rows) < 16 else 3 if len(rows) < 2**16 else 5
    layout = _layout_of(rows[0])
    if len(data) != header + len(rows) * layout.itemsize:
        return None
    table = np.frombuffer(data, layout, offset=header)
    first = table[:1].copy()
    is_alike = all((table[name] == first[name]).all() for name in ("name_length", "pop_length"))
    is_alike = is_alike and all((table[f"{rate}_type"] == FLOAT).all() for rate in RATES)
    return table if is_alike else None


def _layout_of(row: DemandRate) -> "np.dtype[np.void]":
    """Return the layout of a row's record: where its names, their lengths, and its rates are."""
    names, formats, offsets, at = [], [], [], 1
    for field, key in zip(row.__struct_fields__, row.__struct_encode_fields__, strict=True):
        at += 1 + len(key)
        value = getattr(row, field)
        if field in RATES:
            parts = [(f"{field}_type", "u1"), (field, ">f8")]
        else:
            size = len(value.encode())
            before = 1 if size < 2**5 else 2 if size < 2**8 else 3
            short = "pop" if field == "pop" else "name"
            parts = [(f"{short}_length", f"V{before}"), (short, f"S{max(1, size)}")]
        for name, kind in parts:
            names.append(name)
            formats.append(kind)
            offsets.append(at)
            at += np.dtype(kind).itemsize
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": at}
    dtype: np.dtype[np.void] = np.dtype(layout)
    return dtype


def _read_table(table: "np.ndarray[Any, Any]", index: Mapping[PopId, int]) -> DemandColumns:
    names: defaultdict[DeploymentId, int] = defaultdict(count().__next__)
    of_row, pops = np.ascontiguousarray(table["name"]), np.ascontiguousarray(table["pop"])
    begins = [0, *(np.flatnonzero(of_row[1:] != of_row[:-1]) + 1).tolist()]
    ends = [*begins[1:], len(table)]
    numbers = [names[DeploymentId(name.decode())] for name in of_row[begins].tolist()]
    # Deployments that are used in the same cities share the numbers of these.
    known: dict[bytes, Ints] = {}
    cities = []
    for begin, end in zip(begins, ends, strict=True):
        part = pops[begin:end]
        key = part.tobytes()
        if key not in known:
            known[key] = np.fromiter(_cities(part.tolist(), index), np.int64, end - begin)
        cities.append(known[key])
    return DemandColumns(
        list(names),
        np.repeat(np.array(numbers, np.int64), np.diff([*begins, len(table)])),
        np.concatenate(cities),
        [table[rate].astype(np.float64) for rate in RATES],
    )


def _cities(pops: Sequence[bytes], index: Mapping[PopId, int]) -> Iterator[int]:
    return (index.get(PopId(pop.decode()), -1) for pop in pops)
