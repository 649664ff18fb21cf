"""Prints the multiples in relay.md from the tables in relay_tables.md.

`python -m ops.bench.relay_summary [--tables FILE]`. For each number of replicas and each size of
a body: our requests a second, with one process per core, as a multiple of the best cache-aware
router's and of vllm-router's round robin; and of each paced load our processor time per token as
a multiple of round robin's.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

OURS = "isochrone, compiled, one process per core"
ONE_PROCESS = "isochrone, compiled"
ROUND_ROBIN = "vllm-router round_robin"
CACHE_AWARE = ("vllm-router cache_aware", "sglang-router cache_aware", "smg cache_aware")
TABLES = Path(__file__).parent / "relay_tables.md"

# By group (replicas, or nothing) and load: each router's figure.
Cells = dict[tuple[str, str], dict[str, float]]


def section(text: str, title: str) -> str:
    """The section of this title, up to the next one."""
    _, _, after = text.partition(f"\n## {title}\n")
    return after.partition("\n## ")[0]


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of the tables, after the number of replicas that stands before its table."""
    group = ""
    for line in text.splitlines():
        if found := re.fullmatch(r"(\d+) replicas", line):
            group = found[1]
        elif line.startswith("| ") and not line.startswith(("| router", "| streams")):
            yield group, [cell.strip() for cell in line.strip("|").split("|")]


def rates(tables: str) -> Cells:
    """Requests a second by replicas and size."""
    cells: Cells = {}
    for group, row in rows(section(tables, "Real request sizes")):
        size = re.sub(r"plain (.*) c=\d+", r"\1", row[1])
        cells.setdefault((group, size), {})[row[0]] = float(row[2].replace(",", ""))
    return cells


def costs(tables: str) -> Cells:
    """Microseconds of processor time per token by load."""
    cells: Cells = {}
    for group, row in rows(section(tables, "Paced streams")):
        cells.setdefault((group, row[0]), {})[row[1]] = float(row[2])
    return cells


def summary(tables: str) -> Iterator[str]:
    """The lines of both tables."""
    of_rates = rates(tables)
    sizes = list(dict.fromkeys(size for _, size in of_rates))
    yield "| replicas | compared with | " + " | ".join(sizes) + " |"
    yield "|---" * (2 + len(sizes)) + "|"
    for name, others in (("cache-aware", CACHE_AWARE), ("round robin", (ROUND_ROBIN,))):
        for group in dict.fromkeys(group for group, _ in of_rates):
            cells = [of_rates[group, size] for size in sizes]
            ratios = [cell[OURS] / max(cell[other] for other in others) for cell in cells]
            yield f"| {group} | {name} | " + " | ".join(f"{one:.2f}" for one in ratios) + " |"
    yield ""
    yield "| streams x tokens/s | one process | one per core | a copying relay |"
    yield "|---|---|---|---|"
    for (_, load), cell in costs(tables).items():
        ours = (cell[name] / cell[ROUND_ROBIN] for name in (ONE_PROCESS, OURS, "floor"))
        yield f"| {load} | " + " | ".join(f"{one:.2f}" for one in ours) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES)
    print("\n".join(summary(parser.parse_args().tables.read_text())))


if __name__ == "__main__":
    main()
