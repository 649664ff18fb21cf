"""The cases of the simulation: a trace, a model, and the speed that gives a wanted load.

Load is the demand of a trace in its busiest twentieth, as a share of what the fleet could do if all
replicas read prompts all the time, with the cached share that the oracle reaches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim import traces
from ops.sim.traces import TraceRequest, TraceSlice
from ops.sim.world import BIG, LLAMA_8B, RoutingWorld, SimulatedModel, build_world

WINDOWS: Final = 20


class SimulationCase(NamedTuple):
    """A trace, the model that serves it, and the cached share of prompts that the oracle reaches.

    `skip` is the number of requests left out at the beginning.
    """

    name: str
    read: Callable[[Path, TraceSlice], list[TraceRequest]]
    path: str
    model: SimulatedModel
    cached_share: float
    skip: int = 0


MOONCAKE: Final = SimulationCase(
    "Mooncake conversation",
    traces.mooncake,
    "traces/mooncake_conversation_trace.jsonl.gz",
    BIG,
    0.30,
)
AZURE: Final = SimulationCase(
    "Azure 2023 conversation", traces.azure, f"traces/{traces.AZURE}", LLAMA_8B, 0.0
)
CODE: Final = SimulationCase(
    "Azure 2023 code", traces.azure, "traces/azure2023_code.csv.gz", LLAMA_8B, 0.0
)
SERVEGEN: Final = SimulationCase("ServeGen sessions", traces.sessions, "servegen", LLAMA_8B, 0.77)
CASES: Final = (MOONCAKE, AZURE, SERVEGEN)

HELD_OUT: Final = (
    MOONCAKE._replace(name="Mooncake, 4,000 to 8,000", skip=4000),
    MOONCAKE._replace(name="Mooncake, 8,000 to 12,000", skip=8000),
    AZURE._replace(name="Azure, 8,000 to 12,000", skip=8000),
    AZURE._replace(name="Azure, from 16,000", skip=16_000),
    SERVEGEN._replace(name="ServeGen m-small", read=partial(traces.sessions, model="m-small")),
    SERVEGEN._replace(
        name="ServeGen deepseek-r1", read=partial(traces.sessions, model="deepseek-r1")
    ),
    SimulationCase("arXiv summaries", traces.summaries, "traces", LLAMA_8B, 0.0, skip=12_000),
)
"""Parts of the traces, and other traces, that ranking was not tuned on."""


def case_world(case: SimulationCase, folder: Path, seed: int = 1) -> RoutingWorld:
    """Return the fleet of a case."""
    return build_world(folder / "rtt" / "azure_region_rtt_matrix.csv", case.model, seed)


def fleet_seconds_per_request(
    world: RoutingWorld, requests: Sequence[TraceRequest], cached_share: float
) -> float:
    """Return how long one of these requests keeps the whole fleet busy, on average."""
    per_s = 0.0
    outputs = sum(request.output_tokens for request in requests) / len(requests)
    for site in world.sites:
        profile = site.profile
        work = 0.0
        for request in requests:
            tokens = request.prompt_tokens
            depth = tokens * (1 + cached_share) / 2
            read = tokens * (1 - cached_share) * (1 + depth / profile.attention_tokens)
            work += max(read, profile.step_s * site.true_rate)
        # Beside a prompt, an output token costs only what it adds to the step.
        context = sum(request.prompt_tokens for request in requests) / len(requests) + outputs / 2
        output_s = profile.step_per_sequence_s + context * profile.step_per_context_token_s
        busy_s = work / len(requests) / site.true_rate + outputs * output_s
        per_s += 1 / busy_s
    return 1 / per_s


def speed_for_load(
    load: float, world: RoutingWorld, requests: Sequence[TraceRequest], cached_share: float
) -> float:
    """Return the factor that speeds the trace up so that its busiest part has this load."""
    ends_s = requests[-1].at_s
    counts = [0.0] * WINDOWS
    for request in requests:
        at = min(WINDOWS - 1, int(WINDOWS * request.at_s / ends_s))
        counts[at] += request.prompt_tokens
    share = max(counts) / sum(counts)
    busy_s = share * len(requests) * fleet_seconds_per_request(world, requests, cached_share)
    return load * ends_s / WINDOWS / busy_s
