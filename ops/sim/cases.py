"""The cases of the proof: which trace on which fleet, and how fast it must go for a given load.

Load is what a trace asks for in its busiest twentieth, as a share of what the fleet could do if all
replicas read prompts all the time, with as much of the prompts cached as the oracle has there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim import traces
from ops.sim.traces import Part, Request
from ops.sim.world import BIG, LLAMA_8B, Model, World, a_world

WINDOWS: Final = 20


class Case(NamedTuple):
    """A trace from some request on, the model that answers it, and which share of its prompts the
    oracle has cached.
    """

    name: str
    read: Callable[[Path, Part], list[Request]]
    path: str
    model: Model
    cached_share: float
    skip: int = 0


MOONCAKE: Final = Case(
    "Mooncake conversation",
    traces.mooncake,
    "traces/mooncake_conversation_trace.jsonl.gz",
    BIG,
    0.30,
)
AZURE: Final = Case(
    "Azure 2023 conversation", traces.azure, f"traces/{traces.AZURE}", LLAMA_8B, 0.0
)
SERVEGEN: Final = Case("ServeGen sessions", traces.sessions, "servegen", LLAMA_8B, 0.77)
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
    Case("arXiv summaries", traces.summaries, "traces", LLAMA_8B, 0.0, skip=12_000),
)
"""Parts of the traces, and other traces, that nothing was tuned on."""


def world_of(case: Case, folder: Path, seed: int = 1) -> World:
    """Return the fleet of a case."""
    return a_world(folder / "rtt" / "azure_region_rtt_matrix.csv", case.model, seed)


def seconds_each(world: World, requests: Sequence[Request], cached_share: float) -> float:
    """Return how long the whole fleet is busy with one of these requests, on average."""
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
        # Beside a prompt, a token of output costs what it adds to the step.
        busy_s = work / len(requests) / site.true_rate + outputs * profile.step_per_sequence_s
        per_s += 1 / busy_s
    return 1 / per_s


def speed_for(load: float, world: World, requests: Sequence[Request], cached_share: float) -> float:
    """Return by how much to speed the trace up so that its busiest part is `load`."""
    ends_s = requests[-1].at_s
    counts = [0.0] * WINDOWS
    for request in requests:
        at = min(WINDOWS - 1, int(WINDOWS * request.at_s / ends_s))
        counts[at] += request.prompt_tokens
    share = max(counts) / sum(counts)
    busy_s = share * len(requests) * seconds_each(world, requests, cached_share)
    return load * ends_s / WINDOWS / busy_s
