"""Make formats.json: what this release writes on disks, on the wire and into the database.

    python -m ops.golden.make_formats

is run when a release is out; until the next, tests hold the code to what that one wrote and reads
(`tests/unit/wire/test_formats.py`). Of each thing there is a `whole` one, with every field filled,
and the `least`, without those that have a default; `asked_for` are the fields that have none, of
every struct that others than schedulers read.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from msgspec import inspect

from isochrone.service.trust.identity import Identity
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.models.model import CatalogModel, EngineSettings, PlacementPolicy
from isochrone.wire.peers.assignment import Assignment
from isochrone.wire.peers.control import (
    Challenge,
    JoinReply,
    JoinRequest,
    Register,
    RegistrationRefused,
    Renew,
    Renewed,
    Welcome,
)
from isochrone.wire.peers.report import Pulse, Report
from isochrone.wire.peers.rollout import RolloutSpec
from isochrone.wire.peers.routes import (
    KeyEntry,
    KeyLimits,
    KeyTable,
    RouteDelta,
    RouteTable,
    SnapshotWanted,
)
from isochrone.wire.peers.usage import Demand, RoundTrips, Usage, UsageAck, UsageRow
from nodeagent.host.engines.engine_record import EngineRecord
from scheduler.decide.whatif.simulation import FORMAT, ClusterSnapshot
from scheduler.store.migrate import read_migrations

FILE: Final = Path(__file__).parent / "formats.json"

TO_SCHEDULERS: Final = (
    *(JoinRequest, Register, Renew, Report, Pulse),
    *(Demand, Usage, RoundTrips, SnapshotWanted),
)
"""Read by schedulers, which are upgraded first: no older one meets a newer peer's."""

TO_ALL: Final = (
    *(JoinReply, Challenge, Welcome, RegistrationRefused, Renewed, UsageAck),
    *(Assignment, RouteTable, RouteDelta),  # on disks, too
    *(UsageRow, Identity, EngineRecord, EngineStats),
    *(CatalogModel, EngineSettings, PlacementPolicy, KeyLimits, RolloutSpec),  # in the database
    ClusterSnapshot,
)

_TEXTS: Final = ("a1", "ams", "NL", "file:/a", "a" * 64, "unified")
_NUMBERS: Final = (7, 1, 0.5, 50)
_FILLED: Final = {"format": FORMAT}


def sample(kind: Any, whole: bool, within: tuple[type, ...] = ()) -> Any:
    """Return one of this kind as JSON has it, the same at each call; nothing holds its own kind."""
    match kind:
        case inspect.StructType():
            within = (*within, kind.cls)
            tag = {} if kind.tag is None else {kind.tag_field: kind.tag}
            return tag | {
                field.encode_name: _FILLED.get(field.name, sample(field.type, whole, within))
                for field in kind.fields
                if whole or field.required
            }
        case inspect.CustomType(cls=cls) if cls is KeyTable:
            return [sample(inspect.type_info(KeyEntry), whole, within)]
        case inspect.UnionType():
            if not whole and kind.includes_none:
                return None
            return sample(next(t for t in kind.types if not _is_none(t)), whole, within)
        case inspect.VarTupleType() | inspect.ListType():
            if getattr(kind.item_type, "cls", None) in within:
                return []
            return [sample(kind.item_type, whole, within)]
        case inspect.TupleType():
            return [sample(item, whole, within) for item in kind.item_types]
        case inspect.NamedTupleType():
            # An array of all fields: one that leaves out the last ones, which have a default, is
            # what an older release wrote.
            fields = [field for field in kind.fields if whole or field.required]
            return [sample(field.type, whole, within) for field in fields]
        case inspect.DictType():
            return {sample(kind.key_type, whole): sample(kind.value_type, whole, within)}
        case inspect.EnumType():
            return list(kind.cls)[-1].value
        case inspect.StrType():
            return next(text for text in _TEXTS if _is_one(text, kind))
        case inspect.IntType() | inspect.FloatType():
            return next(number for number in _NUMBERS if _is_within(number, kind))
        case inspect.BytesType():
            return "AAEC"
        case inspect.BoolType():
            return True
        case _:
            raise TypeError(f"cannot fill {kind}")


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)


def _is_one(text: str, kind: inspect.StrType) -> bool:
    return len(text) >= (kind.min_length or 0) and bool(re.search(kind.pattern or "", text))


def _is_within(number: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    if isinstance(kind, inspect.IntType) and not isinstance(number, int):
        return False
    return (
        (kind.ge is None or number >= kind.ge)
        and (kind.gt is None or number > kind.gt)
        and (kind.le is None or number <= kind.le)
        and (kind.lt is None or number < kind.lt)
    )


def fields_of(kinds: Iterable[Any], *, required: bool) -> dict[str, list[str]]:
    """Return the fields of all structs that these hold, or those without a default."""
    found: dict[str, list[str]] = {}

    def walk(kind: Any) -> None:
        if isinstance(kind, inspect.StructType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = [
                field.encode_name for field in kind.fields if field.required or not required
            ]
            for field in kind.fields:
                walk(field.type)
        for part in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
            walk(part)
        if isinstance(kind, inspect.CustomType) and kind.cls is KeyTable:
            walk(inspect.type_info(KeyEntry))
        if hasattr(kind, "item_type"):
            walk(kind.item_type)

    for kind in kinds:
        walk(inspect.type_info(kind))
    return found


def formats() -> dict[str, Any]:
    """Return all that is kept and said, by the name of its struct."""
    made: dict[str, Any] = {
        "migrations": {migration.name: migration.sha256 for migration in read_migrations()},
        "asked_for": fields_of(TO_ALL, required=True),
    }
    for kind in (*TO_SCHEDULERS, *TO_ALL):
        described = inspect.type_info(kind)
        made[kind.__name__] = {
            "whole": sample(described, True),
            "least": sample(described, False),
        }
    return made


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in formats().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
