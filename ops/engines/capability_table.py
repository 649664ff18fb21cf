"""Writes the table of engines' capabilities into docs/engine.md.

python -m ops.engines.capability_table
"""

from pathlib import Path
from typing import Final

from isochrone.wire.engine_capabilities import capability_table

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
BEGIN: Final = "<!-- made by ops/engines/capability_table.py -->"
END: Final = "<!-- end -->"


def with_table(text: str) -> str:
    """Return a document with the current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{capability_table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
