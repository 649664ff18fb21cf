"""Splits a whole route table into parts below a size limit, and joins them again.

A table of a million keys takes about 280 MB: too much for one message, and too long to decode in
one piece while requests wait. Parts are made one at a time, and joined one at a time.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.ids import KeyId
from isochrone.wire.routes import KeyEntry, KeyLimits, RouteTable, RouteTablePart

PART_BYTES_MAX: Final = 512 * 1024
"""Largest part, about 2,000 keys: a router decodes it in some 5 ms. A single entry may be larger,
up to the limit of a frame."""

ENTRIES_FIRST: Final = 1024
"""Entries of the first part of each kind; later ones have as many as fit."""

TABLE_ENTRIES_MAX: Final = 4_000_000
"""A router assembles no more entries than this, about 1.5 GB of memory."""

_FIELDS: Final = ("pops", "deployments", "routes", "keys_revoked", "keys")


class AssembledTable(NamedTuple):
    """A whole table and its keys by id."""

    table: RouteTable
    keys: dict[KeyId, KeyEntry]


class BadParts(ValueError):
    """The received parts do not make a table."""


def split_table(table: RouteTable, bytes_max: int = PART_BYTES_MAX) -> Iterator[bytes]:
    """Encode the parts of `table`, each when it is asked for."""
    index = 0
    for field in _FIELDS:
        entries = getattr(table, field)
        start, count = 0, ENTRIES_FIRST
        while start < len(entries):
            part = _part(table, index, **{field: entries[start : start + count]})
            frame = codec.encode(part)
            if len(frame) > bytes_max and count > 1:
                count //= 2
                continue
            yield frame
            index += 1
            start += count
            if len(frame) < bytes_max // 2:
                count *= 2
    yield codec.encode(_part(table, index, is_last=True))


def encode_table(table: RouteTable) -> Iterator[bytes]:
    """Return the bytes of `codec.encode(table)` in pieces.

    For a thread: the interpreter is free between the entries, so that the event loop has its turns.
    """
    rest = codec.encode(msgspec.structs.replace(table, **dict.fromkeys(_FIELDS, ())))
    for field in RouteTable.__struct_fields__:
        if field not in _FIELDS:
            continue
        # 0x90 is an empty list; 0xdd begins a list with a length of 32 bits.
        name = msgspec.msgpack.encode(field)
        before, _, rest = rest.partition(name + b"\x90")
        entries = getattr(table, field)
        yield before + name + b"\xdd" + len(entries).to_bytes(4, "big")
        for start in range(0, len(entries), ENTRIES_FIRST):
            yield b"".join(
                msgspec.msgpack.encode(entry) for entry in entries[start : start + ENTRIES_FIRST]
            )
    yield rest


class TableAssembler:
    """Joins the parts of one table at a time."""

    def __init__(self, entries_max: int = TABLE_ENTRIES_MAX) -> None:
        """Refuse tables of more than `entries_max` entries."""
        self._entries_max = entries_max
        self._first: RouteTablePart | None = None
        self._is_refused = False
        self._next_index = 0
        self._entries = 0
        self._lists: dict[str, list[Any]] = {}
        self._keys: dict[KeyId, KeyEntry] = {}
        self._shared: dict[Any, Any] = {}

    def add(self, part: RouteTablePart, known: Mapping[KeyId, KeyEntry]) -> AssembledTable | None:
        """Take one part; return the table when it is complete.

        Raises BadParts, once for each table; the later parts of a refused table are ignored.

        A key that is the same in `known` is taken from there, so that a table which replaces
        another does not need twice the memory.
        """
        if part.index == 0:
            self._begin(part)
        if self._is_refused:
            return None
        if part.index != self._next_index or not self._is_same_table(part):
            self._refuse()
            raise BadParts(f"cannot use part {part.index} of a table: the one before it is missing")
        self._next_index += 1
        for field in _FIELDS:
            entries = getattr(part, field)
            self._entries += len(entries)
            if self._entries > self._entries_max:
                self._refuse()
                raise BadParts(
                    f"cannot assemble generation {part.generation}: it has more than "
                    f"{self._entries_max} entries"
                )
            if field == "keys":
                self._add_keys(entries, known)
            else:
                self._lists[field] += entries
        if not part.is_last:
            return None
        table = RouteTable(
            cluster_id=part.cluster_id,
            generation=part.generation,
            epoch=part.epoch,
            **{field: tuple(entries) for field, entries in self._lists.items()},
        )
        assembled = AssembledTable(table, self._keys)
        self.drop()
        return assembled

    def drop(self) -> None:
        """Forget a table that is not complete."""
        self._first = None
        self._lists, self._keys, self._shared = {}, {}, {}

    def _begin(self, part: RouteTablePart) -> None:
        self.drop()
        self._is_refused = False
        self._first = part
        self._next_index = self._entries = 0
        self._lists = {field: [] for field in _FIELDS}

    def _refuse(self) -> None:
        self.drop()
        self._is_refused = True

    def _is_same_table(self, part: RouteTablePart) -> bool:
        first = self._first
        return first is not None and (
            (part.cluster_id, part.generation, part.epoch)
            == (first.cluster_id, first.generation, first.epoch)
        )

    def _add_keys(self, keys: tuple[KeyEntry, ...], known: Mapping[KeyId, KeyEntry]) -> None:
        entries = self._lists["keys"]
        for key in keys:
            same = known.get(key.key_id)
            entry = same if same == key else self._with_shared_fields(key)
            entries.append(entry)
            self._keys[entry.key_id] = entry

    def _with_shared_fields(self, key: KeyEntry) -> KeyEntry:
        """Return `key` with one object for all equal limits, tenants and lists of deployments."""
        share = self._shared.setdefault
        limits: KeyLimits = share(key.limits, key.limits)
        return KeyEntry(
            key_id=key.key_id,
            secret_sha256=key.secret_sha256,
            tenant_id=share(key.tenant_id, key.tenant_id),
            deployments=share(key.deployments, key.deployments),
            limits=limits,
            expires_at=key.expires_at or 0.0,
            spent_until=key.spent_until or 0.0,
        )


def _part(table: RouteTable, index: int, **fields: Any) -> RouteTablePart:
    return RouteTablePart(
        cluster_id=table.cluster_id,
        generation=table.generation,
        epoch=table.epoch,
        index=index,
        **fields,
    )
