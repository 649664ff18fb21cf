"""Writes schema.sql: all migrations in order, as one file to read or to create a database from."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
HEAD: Final = "-- The whole schema at head. Written by `python -m migrations.dump`; do not edit.\n"


def dump(folder: Path = FOLDER) -> str:
    """Return the contents that schema.sql should have."""
    parts = [path.read_text() for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.sql"))]
    return HEAD + "".join(f"\n{part}" for part in parts)


if __name__ == "__main__":
    (FOLDER / "schema.sql").write_text(dump())
