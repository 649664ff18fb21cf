"""Draws the result of a what-if as a world map: TTFT by city, replicas by PoP, and moves."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

from isochrone.cli.client import AdminError

TTFT_SHOWN_MS: Final = 1000.0
"""End of the colour scale; slower cities get the same colour."""


def draw(answer: dict[str, Any], pops: list[dict[str, Any]], path: Path) -> None:
    """Draw the planned state and write it as a PNG. Raises AdminError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AdminError(
            "cannot draw the map: matplotlib is not installed; `pip install matplotlib`"
        ) from error
    places = {pop["pop"]: (pop["longitude"], pop["latitude"]) for pop in pops}
    figure = Figure(figsize=(14, 7.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_world(axes, places)
    coloured = _draw_cities(axes, answer["then"]["cities"], places)
    _draw_replicas(axes, answer["then"]["pops"], places)
    _draw_moves(axes, answer["moves"], places)
    if coloured is not None:
        figure.colorbar(coloured, ax=axes, label="p90 TTFT, ms", shrink=0.7)
    changes = "; ".join(answer["changes"]) or "no changes"
    axes.set_title(f"{changes}: {len(answer['moves'])} moves, plan {answer['digest']}")
    axes.legend(loc="lower left", fontsize=8)
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise AdminError(f"cannot write {path}: {error.strerror}") from error


def _draw_world(axes: Any, places: dict[str, tuple[float, float]]) -> None:
    axes.set(xlim=(-180, 180), ylim=(-60, 80), xlabel="longitude", ylabel="latitude")
    axes.set_xticks(range(-180, 181, 30))
    axes.set_yticks(range(-60, 81, 20))
    axes.set_axisbelow(True)
    axes.grid(color="0.9")
    axes.set_facecolor("0.98")
    if places:
        axes.scatter(*zip(*places.values(), strict=True), s=4, color="0.7", label="PoP")


def _draw_cities(
    axes: Any, cities: list[dict[str, Any]], places: dict[str, tuple[float, float]]
) -> Any:
    served = [c for c in cities if c["pop"] in places and c["ttft_p90_ms"] is not None]
    unserved = [c for c in cities if c["pop"] in places and c["ttft_p90_ms"] is None]
    requests_max = max((city["requests_per_s"] for city in cities), default=1.0) or 1.0
    if unserved:
        axes.scatter(
            *zip(*(places[city["pop"]] for city in unserved), strict=True),
            s=[30 + 400 * city["requests_per_s"] / requests_max for city in unserved],
            facecolors="none", edgecolors="red", linewidths=1.5, label="city without capacity",
        )  # fmt: skip
    if not served:
        return None
    return axes.scatter(
        *zip(*(places[city["pop"]] for city in served), strict=True),
        s=[30 + 400 * city["requests_per_s"] / requests_max for city in served],
        c=[min(city["ttft_p90_ms"], TTFT_SHOWN_MS) for city in served],
        cmap="viridis_r", alpha=0.6, vmin=0, label="city, sized by requests",
    )  # fmt: skip


def _draw_replicas(
    axes: Any, pops: list[dict[str, Any]], places: dict[str, tuple[float, float]]
) -> None:
    holding = [pop for pop in pops if pop["replicas"] and pop["pop"] in places]
    if holding:
        axes.scatter(
            *zip(*(places[pop["pop"]] for pop in holding), strict=True),
            marker="s", s=26, facecolors="none", edgecolors="black", label="PoP with replicas",
        )  # fmt: skip


def _draw_moves(
    axes: Any, moves: list[dict[str, Any]], places: dict[str, tuple[float, float]]
) -> None:
    for kind, marker, colour in (("start", "+", "tab:green"), ("end", "x", "tab:red")):
        counts = Counter(
            move["pop"] for move in moves if move["kind"] == kind and move["pop"] in places
        )
        if counts:
            axes.scatter(
                *zip(*(places[pop] for pop in counts), strict=True),
                marker=marker, s=[40 + 10 * count for count in counts.values()], c=colour,
                label=f"replicas to {kind}: {sum(counts.values())}",
            )  # fmt: skip
