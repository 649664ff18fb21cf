"""Compare the simulator with a live fleet: replay its arrivals and print both distributions.

    python -m ops.sim.calibration FILE.json [--replica flowing|boundaries|stepped]

`ops.sim.calibrate` writes the file, with each replica's times when it was profiled alone, and each
request with its time to first token. The replicas' rates are fitted to their times; the requests
are replayed in the simulator with the router's own ranking.
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
from ops.sim.outcome import RunOutcome
from ops.sim.replica import ReplicaKind, SimulatedReplica
from ops.sim.run import simulate
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import EngineProfile, ReplicaSite, RoutingWorld

KV_BLOCK_TOKENS: Final = 16
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
ERRORS_S: Final = (0.03, 0.1, 0.3, 1.0)
"""Bounds of the routers' histogram of prediction errors."""

PROBE_INTERVAL_S: Final = 2.0
"""Load reports that come with probes are half to whole of this old, as the simulator counts."""

KV_TOKENS: Final = (1 << 30) // (2 * 30 * 3 * 64 * 4)
TOKENS_IN_FLIGHT_MAX: Final = 32_768
BATCH_TOKENS_MAX: Final = 256
SEQUENCES_MAX: Final = 16
INTERVAL_S: Final = 0.25

ITL_TOKENS_MIN: Final = 8
"""A shorter answer does not count for the time between tokens: its first tokens may come
together."""


class ProfileProbe(NamedTuple):
    """One request of the profile, sent with `together - 1` others to an otherwise idle replica."""

    pop: str
    together: int
    prompt_tokens: int
    ttft_s: float
    itl_s: float
    output_tokens: int = ITL_TOKENS_MIN


class PlayedRequest(NamedTuple):
    """One request as it was played, with what its client measured."""

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
    """All measurements of the live fleet."""

    probes: Sequence[ProfileProbe]
    asked: Sequence[PlayedRequest]
    load: float
    words_age_s: float = PROBE_INTERVAL_S
    """Age of load reports."""
    others: Sequence[float] = ()
    """Share of the machine that other processes took during the profile, and during the run."""
    errors: Mapping[str, float] = {}
    """The routers' histogram of prediction errors: counts by upper bound in seconds."""


class FittedReplica(NamedTuple):
    """One replica's fitted rates, and the constant part of its times to first token."""

    pop: str
    profile: EngineProfile
    overhead_s: float


class ComparedRequest(NamedTuple):
    """One request's time to first token in ms, measured and simulated."""

    played: PlayedRequest
    measured_ms: float
    simulated_ms: float
    simulated_pop: str


def fit_replicas(probes: Sequence[ProfileProbe]) -> list[FittedReplica]:
    """Fit each replica's rates by least squares.

    Prefill by prompt size, with a quadratic term for attention; the time between tokens by the
    number of sequences.
    """
    found = []
    for pop in sorted({probe.pop for probe in probes}):
        alone = [p for p in probes if p.pop == pop and p.together == 1]
        sizes = np.array([float(p.prompt_tokens) for p in alone])
        took = np.array([p.ttft_s for p in alone])
        # Relative errors count, so that short prompts matter as much as long ones.
        weights = 1 / took
        columns = np.stack([np.ones_like(sizes), sizes, sizes * sizes / 2], axis=1)
        terms = np.linalg.lstsq(columns * weights[:, None], took * weights, rcond=None)[0]
        overhead_s, token_s, depth_s = (float(term) for term in terms)
        itl_by_count = {
            n: float(np.median([p.itl_s for p in probes if p.pop == pop and p.together == n
                                and p.output_tokens >= ITL_TOKENS_MIN]))
            for n in sorted({p.together for p in probes if p.pop == pop})
        }  # fmt: skip
        counts = np.array([float(n) for n in itl_by_count])
        slope, step_s = np.polyfit(counts, np.array(list(itl_by_count.values())), 1)
        found.append(
            FittedReplica(
                pop,
                EngineProfile(
                    "cpu",
                    1 / token_s,
                    float(step_s),
                    float(slope),
                    token_s / max(1e-9, depth_s),
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
            ReplicaSite(
                number,
                pops.index(replica.pop),
                replica.profile,
                replica.profile.prefill_tokens_per_s,
            )
            for number, replica in enumerate(replicas)
        ),
    )


def replay(
    live: LiveMeasurements,
    replicas: Sequence[FittedReplica],
    kind: ReplicaKind = SimulatedReplica,
) -> RunOutcome:
    """Simulate the same arrivals."""
    pops: list[str] = [city.pop for city in CITIES]
    requests = [
        TraceRequest(
            played.number,
            played.at_s + played.late_s,
            played.prompt_tokens,
            played.output_tokens,
            tuple(played.blocks),
            KV_BLOCK_TOKENS,
            played.session,
            (pops.index(played.city) + 0.5) / len(pops),
        )
        for played in live.asked
    ]
    world = demo_world(replicas)
    return simulate(world, requests, 1.0, live.words_age_s, "ours", replica_kind=kind)


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    first, second = sorted(first), sorted(second)
    return max(
        abs(bisect_right(first, value) / len(first) - bisect_right(second, value) / len(second))
        for value in (*first, *second)
    )


def compare_requests(
    live: LiveMeasurements, outcome: RunOutcome, replicas: Sequence[FittedReplica]
) -> list[ComparedRequest]:
    """Return each played request with its measured and its simulated time to first token."""
    overhead_s = {replica.pop: replica.overhead_s for replica in replicas}
    pops = [replica.pop for replica in replicas]
    simulated = {served.number: served for served in outcome.served}
    compared = []
    for played in live.asked:
        served = simulated[played.number]
        pop = pops[served.replica]
        simulated_ms = 1000 * (served.ttft_s + overhead_s[pop])
        compared.append(ComparedRequest(played, 1000 * played.ttft_s, simulated_ms, pop))
    return compared


def distribution_table(
    live: LiveMeasurements, outcome: RunOutcome, replicas: Sequence[FittedReplica]
) -> str:
    """Return both distributions side by side, by city and for all, with what else differs."""
    compared = compare_requests(live, outcome, replicas)
    lines = [
        "| city | requests | | " + " | ".join(f"p{round(100 * share)}" for share in SHARES)
        + " | mean | KS |",
        "|---|---|---|" + "---|" * (len(SHARES) + 2),
    ]  # fmt: skip
    for name in ("all", *(city.pop for city in CITIES)):
        rows = [row for row in compared if name in ("all", row.played.city)]
        if not rows:
            continue
        measured_ms = [row.measured_ms for row in rows]
        simulated_ms = [row.simulated_ms for row in rows]
        distance = ks_distance(measured_ms, simulated_ms)
        for kind, values in (("measured", measured_ms), ("simulated", simulated_ms)):
            cells = [f"{percentile(values, share):.0f}" for share in SHARES]
            cells += [f"{sum(values) / len(values):.0f}", f"{distance:.2f}"]
            lines.append(f"| {name} | {len(rows)} | {kind} | {' | '.join(cells)} |")
    prompt_tokens = sum(played.prompt_tokens for played in live.asked)
    cached_live = sum(played.cached_tokens for played in live.asked)
    cached_simulated = sum(served.cached_tokens for served in outcome.served)
    same = sum(row.simulated_pop == row.played.served_in for row in compared)
    ratios = [row.simulated_ms / row.measured_ms for row in compared]
    lines += [
        "",
        f"cached: measured {100 * cached_live / prompt_tokens:.1f} %, "
        f"simulated {100 * cached_simulated / prompt_tokens:.1f} %",
        f"served where the simulator serves it: {100 * same / len(live.asked):.0f} %",
        "simulated over measured by request: "
        + ", ".join(f"p{round(100 * s)} {percentile(ratios, s):.2f}" for s in (0.1, 0.5, 0.9)),
        "time between tokens p50, p90 (ms): measured "
        + ", ".join(f"{1000 * percentile([played.itl_s for played in live.asked], q):.0f}"
                    for q in (0.5, 0.9))
        + "; simulated "
        + ", ".join(f"{1000 * percentile([served.itl_s for served in outcome.served], q):.0f}"
                    for q in (0.5, 0.9)),
    ]  # fmt: skip
    return "\n".join(lines)


def prediction_errors_line(live: LiveMeasurements, outcome: RunOutcome) -> str:
    """Return the share of predictions within each bound, live and simulated."""
    texts = []
    count, simulated = live.errors["+Inf"], outcome.errors_ms
    for within_s in ERRORS_S:
        live_count = live.errors[f"{within_s}"] - live.errors[f"-{within_s}"]
        simulated_count = sum(-1000 * within_s < error <= 1000 * within_s for error in simulated)
        live_percent = 100 * live_count / count
        simulated_percent = 100 * simulated_count / len(simulated)
        texts.append(
            f"{1000 * within_s:.0f} ms: {live_percent:.0f} % and {simulated_percent:.0f} %"
        )
    return f"predictions within (measured and simulated) {'; '.join(texts)}"


def read_measurements(path: Path) -> LiveMeasurements:
    """Read the file that `ops.sim.calibrate` wrote."""
    fields: dict[str, Any] = json.loads(path.read_text())
    return LiveMeasurements(
        [ProfileProbe(**probe) for probe in fields["probes"]],
        [PlayedRequest(**played) for played in fields["asked"]],
        fields["load"],
        fields["words_age_s"],
        fields.get("others", ()),
        fields.get("errors", {}),
    )


def main() -> None:
    """Print the fitted rates and the table."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.calibration")
    parser.add_argument("file", type=Path)
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    arguments = parser.parse_args()
    live = read_measurements(arguments.file)
    for when, share in zip(("the profile", "the run"), live.others, strict=False):
        warning = ": the machine was not idle" if share > OTHER_CPU_SHARE_MAX else ""
        print(f"other processes took {100 * share:.1f} % of the machine during {when}{warning}")
    replicas = fit_replicas(live.probes)
    for replica in replicas:
        profile = replica.profile
        print(
            f"{replica.pop}: {profile.prefill_tokens_per_s:.0f} prompt tokens/s, half as many at "
            f"depth {profile.attention_tokens:.0f}, step {1000 * profile.step_s:.1f} ms + "
            f"{1000 * profile.step_per_sequence_s:.1f} ms a sequence, "
            f"{1000 * replica.overhead_s:.1f} ms overhead"
        )
    print()
    outcome = replay(live, replicas, REPLICA_KINDS[arguments.replica])
    print(distribution_table(live, outcome, replicas))
    if live.errors:
        print(prediction_errors_line(live, outcome))


if __name__ == "__main__":
    main()
