"""Joins the parts of a route table without a pause between the steps."""

from isochrone.wire.peers.routes import KeyTable, RouteTable, RouteTablePart
from isochrone.wire.peers.table_parts import TableAssembler


def add_part(assembler: TableAssembler, part: RouteTablePart, known: KeyTable) -> RouteTable | None:
    """Take one part; return the table when it is complete. Raises BadParts as `steps` does."""
    steps = assembler.steps(part, known)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            table: RouteTable | None = end.value
            return table
