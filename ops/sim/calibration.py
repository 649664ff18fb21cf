"""The other half of the calibration: what the simulator makes of arrivals that a live fleet had.

    python -m ops.sim.calibration FILE.json

The file is what `ops.sim.calibrate` kept: each replica's times when it was alone, and each request
with its time to first token. The replicas' rates are fitted to the first; the second are played
again in the simulator, by the router's own choice; both distributions are printed.
"""

import argparse
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ops.fleet.cities import CITIES, round_trip_ms
from ops.sim.cpu_share import OTHER_CPU_SHARE_MAX
from ops.sim.measure import percentile
from ops.sim.run import RunOutcome, simulate
from ops.sim.traces import TraceRequest
from ops.sim.world import EngineProfile, ReplicaSite, RoutingWorld

KV_BLOCK_TOKENS: Final = 16
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
ERRORS_S: Final = (0.03, 0.1, 0.3, 1.0)
"""Bounds of the routers' metric."""

PROBE_INTERVAL_S: Final = 2.0
"""How old words are that come with probes: half to whole of this, as the simulator counts."""

KV_TOKENS: Final = (1 << 30) // (2 * 30 * 3 * 64 * 4)
TOKENS_IN_FLIGHT_MAX: Final = 32_768
BATCH_TOKENS_MAX: Final = 256
SEQUENCES_MAX: Final = 16
INTERVAL_S: Final = 0.25

ITL_TOKENS_MIN: Final = 8
"""A shorter answer tells nothing of the time between tokens: its first may come with its second."""


class ProfileProbe(NamedTuple):
    """One request of the profile: with `together - 1` others, on an otherwise idle replica."""

    pop: str
    together: int
    prompt_tokens: int
    ttft_s: float
    itl_s: float
    output_tokens: int = ITL_TOKENS_MIN


class PlayedRequest(NamedTuple):
    """One request as it was played, and what its client saw."""

    number: int
    at_s: float
    city: str
    session: str
    blocks: Sequence[int]
    late_s: float
    ttft_s: float
    itl_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    served_in: str


class LiveMeasurements(NamedTuple):
    """Everything that was measured."""

    probes: Sequence[ProfileProbe]
    asked: Sequence[PlayedRequest]
    load: float
    words_age_s: float = PROBE_INTERVAL_S
    others: Sequence[float] = ()
    """Which share of the machine was not the fleet's during the profile, and while it was asked."""
    errors: Mapping[str, float] = {}
    """The routers' metric of prediction errors: how many were up to each bound, in seconds."""


class FittedReplica(NamedTuple):
    """One replica's rates, and what its first tokens take besides."""

    pop: str
    profile: EngineProfile
    overhead_s: float


def fit_replicas(probes: Sequence[ProfileProbe]) -> list[FittedReplica]:
    """Fit each replica's rates: time to first token by size, time between tokens by company."""
    found = []
    for pop in sorted({probe.pop for probe in probes}):
        alone = [p for p in probes if p.pop == pop and p.together == 1]
        sizes = np.array([float(p.prompt_tokens) for p in alone])
        took = np.array([p.ttft_s for p in alone])
        # Attention grows with the square; weights make small errors of short prompts count.
        weights = 1 / took
        columns = np.stack([np.ones_like(sizes), sizes, sizes * sizes / 2], axis=1)
        terms = np.linalg.lstsq(columns * weights[:, None], took * weights, rcond=None)[0]
        overhead_s, each_s, deeper_s = (float(term) for term in terms)
        company = {
            n: float(np.median([p.itl_s for p in probes if p.pop == pop and p.together == n
                                and p.output_tokens >= ITL_TOKENS_MIN]))
            for n in sorted({p.together for p in probes if p.pop == pop})
        }  # fmt: skip
        counts = np.array([float(n) for n in company])
        slope, first = np.polyfit(counts, np.array(list(company.values())), 1)
        found.append(
            FittedReplica(
                pop,
                EngineProfile(
                    "cpu",
                    1 / each_s,
                    float(first),
                    float(slope),
                    each_s / max(1e-9, deeper_s),
                    TOKENS_IN_FLIGHT_MAX,
                    KV_TOKENS,
                    SEQUENCES_MAX,
                    BATCH_TOKENS_MAX,
                    INTERVAL_S,
                ),
                overhead_s,
            )
        )
    return found


def demo_world(replicas: Sequence[FittedReplica]) -> RoutingWorld:
    """Return the demo's three cities with these replicas."""
    pops = tuple(city.pop for city in CITIES)
    return RoutingWorld(
        pops,
        tuple(1 / len(pops) for _ in pops),
        tuple(tuple(round_trip_ms(a, b) for b in pops) for a in pops),
        tuple(
            ReplicaSite(at, pops.index(one.pop), one.profile, one.profile.prefill_tokens_per_s)
            for at, one in enumerate(replicas)
        ),
    )


def replay(live: LiveMeasurements, replicas: Sequence[FittedReplica]) -> RunOutcome:
    """Play the same arrivals in the simulator."""
    pops: list[str] = [city.pop for city in CITIES]
    requests = [
        TraceRequest(
            one.number,
            one.at_s + one.late_s,
            one.prompt_tokens,
            one.output_tokens,
            tuple(one.blocks),
            KV_BLOCK_TOKENS,
            one.session,
            (pops.index(one.city) + 0.5) / len(pops),
        )
        for one in live.asked
    ]
    return simulate(demo_world(replicas), requests, 1.0, live.words_age_s, "ours")


def ks_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    one, other = sorted(one), sorted(other)
    return max(
        abs(bisect_right(one, at) / len(one) - bisect_right(other, at) / len(other))
        for at in (*one, *other)
    )


def distribution_table(
    live: LiveMeasurements, outcome: RunOutcome, replicas: Sequence[FittedReplica]
) -> str:
    """Return both distributions side by side, by city and of all."""
    overhead = {one.pop: one.overhead_s for one in replicas}
    pops = [one.pop for one in replicas]
    simulated = {s.number: (s.ttft_s + overhead[pops[s.replica]], s) for s in outcome.served}
    lines = [
        "| city | requests | | " + " | ".join(f"p{round(100 * share)}" for share in SHARES)
        + " | mean | KS |",
        "|---|---|---|" + "---|" * (len(SHARES) + 2),
    ]  # fmt: skip
    for name in ("all", *(city.pop for city in CITIES)):
        asked = [one for one in live.asked if name in ("all", one.city)]
        if not asked:
            continue
        seen = [1000 * one.ttft_s for one in asked]
        foretold = [1000 * simulated[one.number][0] for one in asked]
        gap = ks_distance(seen, foretold)
        for what, values in (("measured", seen), ("simulated", foretold)):
            cells = [f"{percentile(values, share):.0f}" for share in SHARES]
            cells += [f"{sum(values) / len(values):.0f}", f"{gap:.2f}"]
            lines.append(f"| {name} | {len(asked)} | {what} | {' | '.join(cells)} |")
    prompts = sum(one.prompt_tokens for one in live.asked)
    same = sum(pops[simulated[one.number][1].replica] == one.served_in for one in live.asked)
    pairs = [(1000 * one.ttft_s, 1000 * simulated[one.number][0]) for one in live.asked]
    ratios = [foretold / seen for seen, foretold in pairs]
    lines += [
        "",
        f"cached: measured {100 * sum(o.cached_tokens for o in live.asked) / prompts:.1f} %, "
        f"simulated {100 * sum(s.cached_tokens for s in outcome.served) / prompts:.1f} %",
        f"served where the simulator serves it: {100 * same / len(live.asked):.0f} %",
        "simulated over measured by request: "
        + ", ".join(f"p{round(100 * s)} {percentile(ratios, s):.2f}" for s in (0.1, 0.5, 0.9)),
        "time between tokens p50, p90 (ms): measured "
        + ", ".join(f"{1000 * percentile([o.itl_s for o in live.asked], q):.0f}"
                    for q in (0.5, 0.9))
        + "; simulated "
        + ", ".join(f"{1000 * percentile([s.itl_s for s in outcome.served], q):.0f}"
                    for q in (0.5, 0.9)),
    ]  # fmt: skip
    return "\n".join(lines)


def prediction_errors_line(live: LiveMeasurements, outcome: RunOutcome) -> str:
    """Return how far predictions were off, by the routers' own metric and in the simulator."""
    said = []
    count, simulated = live.errors["+Inf"], outcome.errors_ms
    for within_s in ERRORS_S:
        by_metric = live.errors[f"{within_s}"] - live.errors[f"-{within_s}"]
        off = sum(-1000 * within_s < error <= 1000 * within_s for error in simulated)
        shares = 100 * by_metric / count, 100 * off / len(simulated)
        said.append(f"{1000 * within_s:.0f} ms: {shares[0]:.0f} % and {shares[1]:.0f} %")
    return f"predictions within (measured and simulated) {'; '.join(said)}"


def read_measurements(path: Path) -> LiveMeasurements:
    """Read what was kept."""
    kept: dict[str, Any] = json.loads(path.read_text())
    return LiveMeasurements(
        [ProfileProbe(**probe) for probe in kept["probes"]],
        [PlayedRequest(**one) for one in kept["asked"]],
        kept["load"],
        kept["words_age_s"],
        kept.get("others", ()),
        kept.get("errors", {}),
    )


def main() -> None:
    """Print the rates and the table."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.calibration")
    parser.add_argument("file", type=Path)
    live = read_measurements(parser.parse_args().file)
    for when, share in zip(("the profile", "the run"), live.others, strict=False):
        said = ": the machine was not the fleet's alone" if share > OTHER_CPU_SHARE_MAX else ""
        print(f"others took {100 * share:.1f} % of the machine during {when}{said}")
    replicas = fit_replicas(live.probes)
    for one in replicas:
        profile = one.profile
        print(
            f"{one.pop}: {profile.prefill_tokens_per_s:.0f} prompt tokens/s, half as many at depth "
            f"{profile.attention_tokens:.0f}, step {1000 * profile.step_s:.1f} ms + "
            f"{1000 * profile.step_per_sequence_s:.1f} ms a sequence, "
            f"{1000 * one.overhead_s:.1f} ms besides"
        )
    print()
    outcome = replay(live, replicas)
    print(distribution_table(live, outcome, replicas))
    if live.errors:
        print(prediction_errors_line(live, outcome))


if __name__ == "__main__":
    main()
