"""Generates formats.json: what this release writes to disk, to the wire and to the database.

    python -m ops.golden.make_formats

Run it when a release is made. Until the next release, tests check that the code still reads what
that release wrote, and writes what it reads (`tests/unit/wire/test_formats.py`). Each struct has
two samples: `whole` with every field, and `least` without the fields that have a default.
`asked_for` lists the required fields of every struct that not only schedulers read.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from msgspec import inspect

from isochrone.service.identity import Identity
from isochrone.wire.assignment import Assignment
from isochrone.wire.control import (
    Challenge,
    JoinReply,
    JoinRequest,
    Register,
    RegistrationRefused,
    Renew,
    Renewed,
    Welcome,
)
from isochrone.wire.engine import EngineStats
from isochrone.wire.model import CatalogModel, EngineSettings, PlacementPolicy
from isochrone.wire.report import Pulse, Report
from isochrone.wire.rollout import RolloutSpec
from isochrone.wire.routes import KeyLimits, RouteDelta, RouteTable, SnapshotWanted
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck, UsageRow
from nodeagent.host.engines import EngineRecord
from scheduler.decide.what_if import FORMAT, Picture
from scheduler.store.migrate import read_migrations

FILE: Final = Path(__file__).parent / "formats.json"

TO_SCHEDULERS: Final = (
    *(JoinRequest, Register, Renew, Report, Pulse),
    *(Demand, Usage, RoundTrips, SnapshotWanted),
)
"""Read by schedulers only. Schedulers are upgraded first, so none is older than the writer."""

TO_ALL: Final = (
    *(JoinReply, Challenge, Welcome, RegistrationRefused, Renewed, UsageAck),
    *(Assignment, RouteTable, RouteDelta),  # also stored on disk
    *(UsageRow, Identity, EngineRecord, EngineStats),
    *(
        CatalogModel,
        EngineSettings,
        PlacementPolicy,
        KeyLimits,
        RolloutSpec,
    ),  # stored in the database
    Picture,
)

_TEXTS: Final = ("a1", "ams", "NL", "file:/a", "a" * 64)
_NUMBERS: Final = (7, 1, 0.5, 50)
_FILLED: Final = {"format": FORMAT}


def sample(kind: Any, whole: bool, within: tuple[type, ...] = ()) -> Any:
    """Return a sample of a type as JSON, the same at each call.

    `whole` fills all fields, otherwise only the required ones. `within` are the enclosing structs:
    a list of one of them is left empty, which ends the recursion.
    """
    match kind:
        case inspect.StructType():
            within = (*within, kind.cls)
            tag = {} if kind.tag is None else {kind.tag_field: kind.tag}
            return tag | {
                field.encode_name: _FILLED.get(field.name, sample(field.type, whole, within))
                for field in kind.fields
                if whole or field.required
            }
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
        case inspect.DictType():
            return {sample(kind.key_type, whole): sample(kind.value_type, whole, within)}
        case inspect.EnumType():
            return list(kind.cls)[-1].value
        case inspect.StrType():
            return next(text for text in _TEXTS if _matches(text, kind))
        case inspect.IntType() | inspect.FloatType():
            return next(number for number in _NUMBERS if _is_within(number, kind))
        case inspect.BytesType():
            return "AAEC"
        case inspect.BoolType():
            return True
        case _:
            raise TypeError(f"cannot make a sample of {kind}")


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)


def _matches(text: str, kind: inspect.StrType) -> bool:
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
    """Return the field names of these structs and all nested ones, or only the required ones."""
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
        if hasattr(kind, "item_type"):
            walk(kind.item_type)

    for kind in kinds:
        walk(inspect.type_info(kind))
    return found


def formats() -> dict[str, Any]:
    """Return the content of formats.json: samples by name of the struct, and the migrations."""
    content: dict[str, Any] = {
        "migrations": {migration.name: migration.sha256 for migration in read_migrations()},
        "asked_for": fields_of(TO_ALL, required=True),
    }
    for kind in (*TO_SCHEDULERS, *TO_ALL):
        described = inspect.type_info(kind)
        content[kind.__name__] = {
            "whole": sample(described, True),
            "least": sample(described, False),
        }
    return content


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in formats().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
