"""Splits a whole route table into parts below a size limit, and joins them again.

A table of a million keys takes about 280 MB: too much for one message, and too long to decode in
one piece while requests wait. Parts are made one at a time, and joined one at a time. A router
that comes back with most of the keys is sent only the others.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

import msgspec

from isochrone.wire import codec
from isochrone.wire.client_keys.key_sums import KeptBuckets, bucket_of
from isochrone.wire.client_keys.key_table import KeyTableBuilder
from isochrone.wire.ids import ClusterId, Epoch, Generation, KeyId
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyEntry,
    KeyTable,
    Pop,
    Route,
    RouteTable,
    RouteTablePart,
)

PART_BYTES_MAX: Final = 128 * 1024
"""Largest part, about 500 keys: a router takes it in some 3 ms. A single entry may be larger, up to
the limit of a frame."""

ENTRIES_FIRST: Final = 256
"""Entries of the first part of each kind; later ones have as many as fit."""

TABLE_ENTRIES_MAX: Final = 4_000_000
"""A router assembles no more entries than this, about 1.5 GB of memory."""

_FIELDS: Final = ("pops", "deployments", "routes", "keys_revoked", "keys", "adapters")


class BadParts(ValueError):
    """The received parts do not make a table."""


PIECES_PER_STEP: Final = 16
"""The pieces of a table of keys that are looked through before requests have their turn: about
8,000 keys, 2 ms."""

CHANGES_PER_STEP: Final = 64
"""The keys that are replaced in a table before requests have their turn: 3 ms, if each is in
another piece."""


def split_table(
    table: RouteTable, bytes_max: int = PART_BYTES_MAX, kept: KeptBuckets | None = None
) -> Iterator[bytes]:
    """Encode the parts of `table` lazily, one for each step of the iterator.

    Keys of the buckets `kept` are left out. An empty frame is a pause while others are looked for.
    """
    index = 0
    for field, batch in _batches(table, kept):
        if batch is None:
            yield b""
            continue
        entries = _EntryReader(batch)
        count = ENTRIES_FIRST
        while taken := entries.take(count):
            frame = codec.encode(_part(table, index, kept, **{field: taken}))
            if len(frame) > bytes_max and len(taken) > 1:
                entries.put_back(taken)
                count = len(taken) // 2
                continue
            yield frame
            index += 1
            if len(frame) < bytes_max // 2:
                count *= 2
    yield codec.encode(_part(table, index, kept, is_last=True))


def _batches(
    table: RouteTable, kept: KeptBuckets | None
) -> Iterator[tuple[str, Iterable[Any] | None]]:
    """Return the entries of each field; None for a pause."""
    for field in _FIELDS:
        if field != "keys" or kept is None:
            yield field, getattr(table, field)
        elif not kept.are_all:
            pieces = table.keys.pieces
            for start in range(0, len(pieces), PIECES_PER_STEP):
                yield field, None
                keys = chain.from_iterable(pieces[start : start + PIECES_PER_STEP])
                yield field, [key for key in keys if bucket_of(key.key_id) not in kept]


def encode_table(table: RouteTable) -> Iterator[bytes]:
    """Return the bytes of `codec.encode(table)` in pieces.

    For a thread: the interpreter is free between the entries, so that the event loop has its turns.
    """
    empty: dict[str, Any] = {**dict.fromkeys(_FIELDS, ()), "keys": KeyTable()}
    rest = codec.encode(msgspec.structs.replace(table, **empty))
    for field in RouteTable.__struct_fields__:
        if field not in _FIELDS:
            continue
        # 0x90 is an empty list; 0xdd begins a list with a length of 32 bits.
        name = msgspec.msgpack.encode(field)
        before, _, rest = rest.partition(name + b"\x90")
        yield before + name + b"\xdd" + len(getattr(table, field)).to_bytes(4, "big")
        entries = _EntryReader(getattr(table, field))
        while taken := entries.take(ENTRIES_FIRST):
            yield b"".join(msgspec.msgpack.encode(entry) for entry in taken)
    yield rest


class StoredTable(msgspec.Struct, frozen=True, kw_only=True, tag="route_table"):
    """A whole table as `encode_table` wrote it, with its keys still encoded."""

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    pops: tuple[Pop, ...] = ()
    deployments: tuple[DeploymentEntry, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: list[msgspec.Raw] = []
    keys_revoked: tuple[KeyId, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()


_STORED: Final = codec.decoder(StoredTable)
_KEY: Final = codec.decoder(KeyEntry)


def read_table(payload: bytes | memoryview) -> RouteTable:
    """Decode a whole table with one object for all equal fields. Raises MalformedFrame."""
    stored: StoredTable = codec.decode(payload, _STORED, bytes_max=len(payload))
    share = SharedFields()
    fields = {name: getattr(stored, name) for name in StoredTable.__struct_fields__}
    keys = KeyTable.of(
        share.of(codec.decode(key, _KEY, bytes_max=len(payload))) for key in stored.keys
    )
    # Here it is a thread that waits, and not the event loop when the router registers.
    keys.compute_sums()
    fields["keys"] = keys
    return RouteTable(**fields)


class TableAssembler:
    """Joins the parts of one table at a time."""

    def __init__(self, entries_max: int = TABLE_ENTRIES_MAX) -> None:
        """Refuse tables of more than `entries_max` entries."""
        self._entries_max = entries_max
        self._is_refused = False
        self._next_index = 0
        self._entries = 0
        self.drop()

    def steps(
        self, part: RouteTablePart, known: KeyTable
    ) -> Generator[None, None, RouteTable | None]:
        """Take one part, with pauses; return the table when it is complete.

        Raises BadParts, once for each table; the later parts of a refused table are ignored.

        A key that is the same in `known` is taken from there, so that a table which replaces
        another does not need twice the memory. Keys that the parts leave out are those of `known`.
        """
        if part.index == 0:
            self._begin(part, known)
        if self._is_refused:
            return None
        if part.index != self._next_index or not self._is_same_table(part):
            raise self._refuse(
                f"cannot use part {part.index} of a table: the one before it is missing"
            )
        self._next_index += 1
        self._entries += sum(len(getattr(part, field)) for field in _FIELDS)
        if self._entries > self._entries_max:
            raise self._refuse(
                f"cannot assemble generation {part.generation}: it has more than "
                f"{self._entries_max} entries"
            )
        for field, entries in self._lists.items():
            entries += getattr(part, field)
        self._add_keys(part)
        if not part.is_last:
            return None
        keys = self._keys.build() if self._kept is None else (yield from self._keep(self._kept))
        table = RouteTable(
            cluster_id=part.cluster_id,
            generation=part.generation,
            epoch=part.epoch,
            keys_only=part.keys_only,
            keys=keys,
            **{field: tuple(entries) for field, entries in self._lists.items()},
        )
        self.drop()
        return table

    def drop(self) -> None:
        """Forget a table that is not complete."""
        self._first: RouteTablePart | None = None
        self._lists: dict[str, list[Any]] = {}
        self._known, self._keys, self._share = KeyTable(), KeyTableBuilder(), SharedFields()
        self._kept: KeptBuckets | None = None
        self._sent_ids: set[KeyId] = set()
        self._changed: list[KeyEntry] = []

    def _begin(self, part: RouteTablePart, known: KeyTable) -> None:
        self.drop()
        self._is_refused = False
        self._first = part
        self._next_index = self._entries = 0
        self._lists = {field: [] for field in _FIELDS if field != "keys"}
        self._known, self._keys = known, KeyTableBuilder(known)
        if part.keys_kept:
            try:
                self._kept = KeptBuckets(part.keys_kept)
            except ValueError as error:
                raise self._refuse(f"cannot use a table in parts: {error}") from error

    def _refuse(self, reason: str) -> BadParts:
        """Ignore the rest of this table; return the error to raise."""
        self.drop()
        self._is_refused = True
        return BadParts(reason)

    def _is_same_table(self, part: RouteTablePart) -> bool:
        first = self._first
        return first is not None and (
            (part.cluster_id, part.generation, part.epoch)
            == (first.cluster_id, first.generation, first.epoch)
        )

    def _add_keys(self, part: RouteTablePart) -> None:
        try:
            for key in part.keys:
                same = self._known.get(key.key_id)
                if self._kept is None:
                    self._keys.add(same if same == key else self._share.of(key))
                    continue
                self._sent_ids.add(key.key_id)
                if same != key:
                    self._changed.append(self._share.of(key))
        except ValueError as error:
            raise self._refuse(f"cannot use part {part.index} of a table: {error}") from error

    def _keep(self, kept: KeptBuckets) -> Generator[None, None, KeyTable]:
        """Return the known keys, changed as the parts say in buckets that are not `kept`."""
        keys, gone = self._known, list[KeyId]()
        if not kept.are_all:
            for start in range(0, len(keys.pieces), PIECES_PER_STEP):
                pieces = keys.pieces[start : start + PIECES_PER_STEP]
                gone += [
                    key.key_id
                    for key in chain.from_iterable(pieces)
                    if bucket_of(key.key_id) not in kept and key.key_id not in self._sent_ids
                ]
                yield
        for start in range(0, len(gone), CHANGES_PER_STEP):
            keys = keys.replaced((), gone[start : start + CHANGES_PER_STEP])
            yield
        for start in range(0, len(self._changed), CHANGES_PER_STEP):
            keys = keys.replaced(self._changed[start : start + CHANGES_PER_STEP], ())
            yield
        return keys


class SharedFields:
    """One object for all equal limits, tenants and lists of deployments of many keys."""

    def __init__(self) -> None:
        self._objects: dict[Any, Any] = {}

    def of(self, key: KeyEntry) -> KeyEntry:
        """Return `key` with shared fields."""
        share = self._objects.setdefault
        return msgspec.structs.replace(
            key,
            tenant_id=share(key.tenant_id, key.tenant_id),
            deployments=share(key.deployments, key.deployments),
            regions=share(key.regions, key.regions),
            limits=share(key.limits, key.limits),
            expires_at=key.expires_at or 0.0,
            spent_until=key.spent_until or 0.0,
        )


class _EntryReader:
    """Reads entries some at a time."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._rest = iter(entries)

    def take(self, count: int) -> tuple[Any, ...]:
        """Return the next entries, at most `count`; none after the last."""
        return tuple(islice(self._rest, count))

    def put_back(self, entries: tuple[Any, ...]) -> None:
        """Read these again next."""
        self._rest = chain(entries, self._rest)


def _part(table: RouteTable, index: int, kept: KeptBuckets | None, **fields: Any) -> RouteTablePart:
    return RouteTablePart(
        cluster_id=table.cluster_id,
        generation=table.generation,
        epoch=table.epoch,
        keys_only=table.keys_only,
        index=index,
        keys_kept=kept.encode() if kept is not None and index == 0 else b"",
        **fields,
    )
