"""The worlds and the table of `make sim`; five of its cells, small, against what they gave before.

The cells are simulated, so the same code gives the same figures. After a change that makes one
better, lower its number here to what the failed assertion or `-s` prints.
"""

from typing import NamedTuple

import pytest

from ops.sim.data import EXTRACT
from ops.sim.hard_report import HardCell, hard_cells, table_lines
from ops.sim.hard_table import TableOptions, prepare, run_load
from ops.sim.hard_worlds import WORLDS, with_slow_replica
from ops.sim.measure import RunFigures
from ops.sim.one_pop import one_pop
from ops.sim.world import LLAMA_8B

REGRESSION_MAX: float = 0.03


class QuickCell(NamedTuple):
    """A world at one load, and our p90 and p99 over the oracle's when it was last measured."""

    world: str
    load: int
    p90: float
    p99: float


QUICK = (
    QuickCell("one PoP of 8, Mooncake", 80, 1.011, 1.011),
    QuickCell("16 cities, cache x 1/8, Mooncake", 80, 0.994, 0.904),
    QuickCell("16 cities, 70B of today, Mooncake", 95, 1.002, 1.063),
    QuickCell("16 cities, a third lost, Mooncake", 80, 1.045, 1.059),
    QuickCell("16 cities, Azure code", 80, 1.064, 1.27),
)


def run_cell(world: str, load: int) -> HardCell:
    options = TableOptions(EXTRACT, 400, 0, (load,), (1.0,), ("ours",))
    (hard,) = [hard for hard in WORLDS if hard.name == world]
    (cell,) = hard_cells(list(run_load(prepare(hard, options), load, options)))
    return cell


@pytest.mark.parametrize("quick", QUICK, ids=lambda quick: quick.world)
def test_no_cell_is_worse_than_before(quick: QuickCell) -> None:
    cell = run_cell(quick.world, quick.load)
    p90 = cell.ratio(lambda figures: figures.p90_ms)
    p99 = cell.ratio(lambda figures: figures.p99_ms)
    print(f"{quick.world}, {quick.load} %: {p90:.3f}, {p99:.3f}")
    assert p90 <= quick.p90 + REGRESSION_MAX
    assert p99 <= quick.p99 + REGRESSION_MAX


def test_worlds_have_names_of_their_own() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS)


def test_a_slow_replica_is_half_as_fast_as_the_route_table_says() -> None:
    slow, other = with_slow_replica(one_pop(LLAMA_8B, 2)).sites
    assert slow.true_rate == other.true_rate / 2
    assert slow.profile.prefill_tokens_per_s == other.profile.prefill_tokens_per_s
    assert slow.profile.step_s == 2 * other.profile.step_s


def figures(policy: str, p50_ms: float, p90_ms: float, p99_ms: float, hit: float) -> RunFigures:
    return RunFigures(policy, p50_ms, p90_ms, p99_ms, 0.0, hit, 0.0, 0, 0.0, 0.0, 0.0)


def test_each_missed_goal_is_named() -> None:
    oracle = figures("oracle", 100, 200, 300, 50)
    rival = figures("rival", 90, 400, 500, 50)
    met = HardCell("w", 80, 1.0, oracle, figures("ours", 90, 219, 344, 47.5), [rival])
    missed = HardCell("w", 80, 1.0, oracle, figures("ours", 100, 221, 346, 46.5), [rival])
    assert not met.missed
    assert missed.missed == ["p90", "p99", "hits", "behind rival at p50 (1.11)"]
    lines = table_lines([met, missed])
    assert len(lines) == 3
    assert "1 s: p90, p99, hits" in lines[-1]
