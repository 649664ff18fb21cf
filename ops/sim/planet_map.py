"""Draws where the planner places replicas on the planet.

    python -m ops.sim.planet_map --data ../shared/data

Needs matplotlib (the extra `bench`). A dot is a city: grey if it has users but no GPUs, else
coloured by the share of its GPU memory that is used and sized by its replicas.
"""

from collections import Counter
from pathlib import Path

import matplotlib as mpl
import numpy as np

from ops.sim.compare import place_by_planner
from ops.sim.planet import DAY, HOUR
from ops.sim.planet_world import draw, world_parser


def main() -> None:
    """Plan the empty planet for the peak of a day, and draw it."""
    parser = world_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "planet.png")
    args = parser.parse_args()
    mpl.use("Agg")
    from matplotlib import pyplot

    world = draw(args.data, args.seed)
    peak = np.maximum.reduce([world.requests(DAY + hour * HOUR) for hour in range(24)])
    _, _, draft = place_by_planner(world, peak)
    replicas, used, total = Counter[str](), Counter[str](), Counter[str]()
    for state in draft.states:
        for replica in state.replicas:
            replicas[replica.pop] += 1
            used[replica.pop] += state.needs.memory_bytes
    for node in world.nodes:
        total[node.pop] += sum(device.memory_bytes for device in node.devices)
    figure, axes = pyplot.subplots(figsize=(12, 6), dpi=110)
    bare = [pop for pop in world.pops if pop.pop not in total]
    axes.scatter([p.longitude for p in bare], [p.latitude for p in bare], s=6, c="#bbbbbb")
    full = [pop for pop in world.pops if pop.pop in total]
    dots = axes.scatter(
        [p.longitude for p in full],
        [p.latitude for p in full],
        s=[8 + 3 * replicas[p.pop] for p in full],
        c=[used[p.pop] / total[p.pop] for p in full],
        cmap="viridis",
        vmin=0,
        vmax=1,
        alpha=0.8,
    )
    figure.colorbar(dots, label="share of GPU memory used")
    axes.set_title(
        f"{sum(replicas.values())} replicas of {len(world.models)} models in {len(full)} PoPs"
    )
    axes.set_xlabel("longitude")
    axes.set_ylabel("latitude")
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
