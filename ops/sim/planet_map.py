"""Draw where the planner seats the planet: `python -m ops.sim.planet_map --data ../shared/data`.

Needs matplotlib (the extra `bench`). A dot is a city: grey where users ask and no GPU is, coloured
by the share of the GPU memory that is seated, sized by the replicas held.
"""

from collections import Counter
from pathlib import Path

import matplotlib as mpl
import numpy as np

from ops.sim.compare import planned
from ops.sim.planet import DAY, HOUR
from ops.sim.planet_world import draw, world_parser


def main() -> None:
    """Plan the planet from nothing at the peak of a day, and draw it."""
    parser = world_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "planet.png")
    given = parser.parse_args()
    mpl.use("Agg")
    from matplotlib import pyplot

    world = draw(given.data, given.seed)
    peak = np.maximum.reduce([world.requests(DAY + hour * HOUR) for hour in range(24)])
    _, _, search = planned(world, peak)
    held, used, whole = Counter[str](), Counter[str](), Counter[str]()
    for wish in search.wishes:
        for seated in wish.seats:
            held[seated.pop] += 1
            used[seated.pop] += wish.memory_bytes
    for node in world.nodes:
        whole[node.pop] += sum(device.memory_bytes for device in node.devices)
    figure, axes = pyplot.subplots(figsize=(12, 6), dpi=110)
    bare = [pop for pop in world.pops if pop.pop not in whole]
    axes.scatter([p.longitude for p in bare], [p.latitude for p in bare], s=6, c="#bbbbbb")
    full = [pop for pop in world.pops if pop.pop in whole]
    dots = axes.scatter(
        [p.longitude for p in full],
        [p.latitude for p in full],
        s=[8 + 3 * held[p.pop] for p in full],
        c=[used[p.pop] / whole[p.pop] for p in full],
        cmap="viridis",
        vmin=0,
        vmax=1,
        alpha=0.8,
    )
    figure.colorbar(dots, label="share of GPU memory seated")
    axes.set_title(
        f"{sum(held.values())} replicas of {len(world.models)} models in {len(full)} PoPs"
    )
    axes.set_xlabel("longitude")
    axes.set_ylabel("latitude")
    figure.tight_layout()
    figure.savefig(given.out)


if __name__ == "__main__":
    main()
