"""A client's key as routers hold it, and a sorted table of up to millions of them.

A change copies only the pieces that it touches, so that a new table is there within microseconds,
and a comparison of two tables skips the pieces that they share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.client_keys.key_sums import KeySums
from isochrone.wire.ids import KeyId, TenantId

PIECE_KEYS_MAX: Final = 512
"""The most keys of one piece. A change of one key copies a piece."""

PIECE_KEYS_MIN: Final = 64
"""A changed piece with fewer keys is joined with the one before it, if both fit into one."""


BUDGET_PREFIX: Final = "tenant:"
"""The prefix of the id of a tenant's budget, an entry in the table among the keys. Its digest is
empty, so that no secret opens it."""


def budget_id(tenant_id: TenantId | str) -> KeyId:
    """Return the id of the entry with a tenant's budget."""
    return KeyId(f"{BUDGET_PREFIX}{tenant_id}")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The limits of one key; 0 means no limit.

    Concurrency is limited at each router. Rates hold over the fleet: routers tell each other what
    they granted, so that a key is over its rate for a few seconds at most, and owes that. Quotas
    (UTC) hold over the fleet and take effect a few seconds late. `spend_per_day` and
    `spend_per_month` count models that have a price, `tokens_...` all.
    """

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrency: int = 0
    tokens_per_day: int = 0
    spend_per_day: float = 0.0
    tokens_per_month: int = 0
    spend_per_month: float = 0.0


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A client's key as routers hold it: with the SHA-256 of the secret, without the secret.

    `deployments` are the ids of those that the key may use; empty means all. `regions` are PoPs or
    countries that may process its requests; empty means all. `expires_at` is Unix time, 0 for
    never. A quota of the key is used up until `spent_until` (Unix time).

    gc=False, as for routes: keys form no reference cycles, and a table may have a million.
    """

    key_id: KeyId
    secret_sha256: str
    tenant_id: TenantId
    deployments: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()
    expires_at: float = 0.0
    spent_until: float = 0.0
    regions: tuple[str, ...] = ()


Piece = tuple[KeyEntry, ...]

_id_of: Final = attrgetter("key_id")


class KeyChanges(NamedTuple):
    """The difference between two key tables, each part in the order of the ids."""

    changed: tuple[KeyEntry, ...]
    gone: tuple[KeyId, ...]


class KeyTable:
    """An immutable table of keys, sorted by id. Iteration gives the entries."""

    __slots__ = ("_first_ids", "_size", "_sums", "pieces")

    def __init__(self, pieces: Sequence[Piece] = (), sums: KeySums | None = None) -> None:
        """Hold these pieces: sorted, none of them empty. `of` makes them. `sums` are of them."""
        self.pieces = tuple(pieces)
        self._sums = sums
        self._first_ids = [piece[0].key_id for piece in self.pieces]
        self._size = sum(map(len, self.pieces))

    @classmethod
    def of(cls, keys: Iterable[KeyEntry]) -> "KeyTable":
        """Return a table of these keys, in any order. If two have one id, the later is taken."""
        by_id = {key.key_id: key for key in keys}
        ordered = sorted(by_id.values(), key=_id_of)
        return cls(split_evenly(ordered))

    def __len__(self) -> int:
        return self._size

    @property
    def sums(self) -> KeySums:
        """Return the sums of the keys, not to be changed.

        A table of a `KeyTableBuilder`, and each that `replaced` makes of it, has them. For another
        they are computed now: about two seconds for a million keys.
        """
        return self.compute_sums()

    def compute_sums(self) -> KeySums:
        """Return the same. A thread calls it, so that an event loop finds them computed."""
        if self._sums is None:
            sums = KeySums()
            for key in self:
                sums.add(key.key_id, key)
            self._sums = sums
        return self._sums

    def __iter__(self) -> Iterator[KeyEntry]:
        for piece in self.pieces:
            yield from piece

    def __contains__(self, key_id: object) -> bool:
        return isinstance(key_id, str) and self.get(KeyId(key_id)) is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyTable):
            return NotImplemented
        if self.pieces == other.pieces:
            return True
        return len(self) == len(other) and all(map(_is_same, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KeyTable({self._size} keys)"

    def get(self, key_id: KeyId) -> KeyEntry | None:
        """Return a key's entry, None if the table does not have it."""
        index = bisect_right(self._first_ids, key_id) - 1
        if index < 0:
            return None
        piece = self.pieces[index]
        place = bisect_left(piece, key_id, key=_id_of)
        if place < len(piece) and piece[place].key_id == key_id:
            return piece[place]
        return None

    def first_after(self, key_id: KeyId) -> KeyEntry | None:
        """Return the entry with the least id above `key_id`, None if there is none."""
        index = max(0, bisect_right(self._first_ids, key_id) - 1)
        for piece in self.pieces[index : index + 2]:
            place = bisect_right(piece, key_id, key=_id_of)
            if place < len(piece):
                return piece[place]
        return None

    def between(self, after: KeyId, until: KeyId | None) -> "KeyTable":
        """Return the keys after one, up to and with the other; all the rest if that is None."""
        first = max(0, bisect_right(self._first_ids, after) - 1)
        pieces = []
        for piece in self.pieces[first:]:
            if until is not None and piece[0].key_id > until:
                break
            start = bisect_right(piece, after, key=_id_of)
            end = len(piece) if until is None else bisect_right(piece, until, key=_id_of)
            if start < end:
                pieces.append(piece[start:end])
        return KeyTable(pieces)

    def replaced(self, changed: Iterable[KeyEntry], gone: Iterable[KeyId]) -> "KeyTable":
        """Return a table with these keys set and those removed; this one if there are none.

        A key that is both set and gone is set.
        """
        changes: dict[KeyId, KeyEntry | None] = dict.fromkeys(gone)
        changes.update((key.key_id, key) for key in changed)
        if not changes:
            return self
        changes_by_piece: dict[int, dict[KeyId, KeyEntry | None]] = {}
        for key_id, entry in changes.items():
            index = max(0, bisect_right(self._first_ids, key_id) - 1)
            changes_by_piece.setdefault(index, {})[key_id] = entry
        pieces: list[Piece] = []
        copied = 0
        for index in sorted(changes_by_piece):
            pieces += self.pieces[copied:index]
            old = self.pieces[index] if index < len(self.pieces) else ()
            new = _merge(old, changes_by_piece[index])
            is_small = 0 < len(new) < PIECE_KEYS_MIN
            if is_small and pieces and len(pieces[-1]) + len(new) <= PIECE_KEYS_MAX:
                new = [*pieces.pop(), *new]
            pieces += split_evenly(new)
            copied = index + 1
        pieces += self.pieces[copied:]
        return KeyTable(pieces, self._sums_after(changes))

    def _sums_after(self, changes: dict[KeyId, KeyEntry | None]) -> KeySums | None:
        if self._sums is None:
            return None
        sums = self._sums.copy()
        for key_id, entry in changes.items():
            former = self.get(key_id)
            if former is not None:
                sums.remove(key_id, former)
            if entry is not None:
                sums.add(key_id, entry)
        return sums

    def changes_from(self, old: "KeyTable") -> KeyChanges:
        """Return the change that turns `old` into this table. Pieces that both have are skipped."""
        if old is self:
            return KeyChanges((), ())
        shared = set(map(id, old.pieces)).intersection(map(id, self.pieces))
        before = {key.key_id: key for key in _of_pieces(old.pieces, shared)}
        changed = []
        for key in _of_pieces(self.pieces, shared):
            was = before.pop(key.key_id, None)
            if was is not key and was != key:
                changed.append(key)
        return KeyChanges(tuple(changed), tuple(sorted(before)))


class KeyTableBuilder:
    """Builds a table from sorted keys, in steps.

    Its pieces begin where those of a `known` table begin, and a piece that is the same is taken
    from there: tables that differ little share most of their pieces.
    """

    def __init__(self, known: KeyTable | None = None) -> None:
        """Share pieces with `known`."""
        self._known: tuple[Piece, ...] = known.pieces if known is not None else ()
        self._known_index = 0
        self._pieces: list[Piece] = []
        self._open: list[KeyEntry] = []
        self._sums = KeySums()
        self._last_id = ""

    def add(self, entry: KeyEntry) -> None:
        """Add a key. Raises ValueError if its id does not come after the last one's."""
        key_id = entry.key_id
        if key_id <= self._last_id and (self._pieces or self._open):
            raise ValueError(f"key {key_id} comes after {self._last_id}")
        self._last_id = key_id
        known, index = self._known, self._known_index
        if index < len(known) and key_id >= known[index][0].key_id:
            self._close_piece()
            while index < len(known) and key_id >= known[index][0].key_id:
                index += 1
            self._known_index = index
        elif len(self._open) >= PIECE_KEYS_MAX:
            self._close_piece()
        self._open.append(entry)
        self._sums.add(key_id, entry)

    def build(self) -> KeyTable:
        """Return the table."""
        self._close_piece()
        return KeyTable(self._pieces, self._sums)

    def _close_piece(self) -> None:
        if self._open:
            piece = tuple(self._open)
            # The known piece that began last; of equal entries the builder was given its objects.
            same = self._known[self._known_index - 1] if self._known_index else ()
            self._pieces.append(same if same == piece else piece)
            self._open = []


def split_evenly(keys: Sequence[KeyEntry]) -> list[Piece]:
    """Return sorted keys as pieces of about the same length."""
    count = -(-len(keys) // PIECE_KEYS_MAX)
    bounds = [len(keys) * number // count for number in range(count + 1)] if count else []
    return [tuple(keys[start:end]) for start, end in pairwise(bounds)]


def encode_hook(value: object) -> object:
    """Return a key table as msgspec encodes it: the list of its entries."""
    if isinstance(value, KeyTable):
        return list(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_hook(kind: type, value: object) -> object:
    """Return the key table of a decoded list. For small ones: see `table_parts.read_table`."""
    if kind is KeyTable:
        return KeyTable.of(msgspec.convert(value, tuple[KeyEntry, ...]))
    raise NotImplementedError(f"cannot decode {kind.__name__}")


def _merge(old: Piece, changes: dict[KeyId, KeyEntry | None]) -> list[KeyEntry]:
    """Return the keys of a piece after changes; None removes a key."""
    merged: list[KeyEntry] = []
    copied = 0
    for key_id in sorted(changes):
        place = bisect_left(old, key_id, lo=copied, key=_id_of)
        merged += old[copied:place]
        has_key = place < len(old) and old[place].key_id == key_id
        copied = place + 1 if has_key else place
        entry = changes[key_id]
        if entry is not None:
            merged.append(entry)
    merged += old[copied:]
    return merged


def _of_pieces(pieces: Iterable[Piece], but: set[int]) -> Iterator[KeyEntry]:
    for piece in pieces:
        if id(piece) not in but:
            yield from piece


def _is_same(first: KeyEntry, second: KeyEntry) -> bool:
    return first is second or first == second
