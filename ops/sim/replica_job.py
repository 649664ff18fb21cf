"""A request at a simulated replica, and the load that such requests make there."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import structs

from isochrone.ttft_order import NO_OBJECTIVE, TtftObjective
from isochrone.wire.http.headers import ReportedLoad
from nodeagent.decide.requests.prompt_progress import tokens_read
from ops.sim.traces import TraceRequest

ALL_ROUTERS: Final = -1
"""Stands for a PoP without requests: to it, every token is another router's."""


class ReplicaJob:
    """One request at a replica."""

    __slots__ = (
        "admitted_s", "began_s", "cached_tokens", "first_token_at_s", "generated_tokens",
        "given_at_join", "needed_tokens", "objective", "pending_prefill_tokens", "pop",
        "prefill_ms", "request", "work_left",
    )  # fmt: skip

    def __init__(
        self,
        request: TraceRequest,
        needed_tokens: int,
        pending_prefill_tokens: int,
        pop: int,
        prefill_ms: float,
        objective: TtftObjective = NO_OBJECTIVE,
    ) -> None:
        self.request = request
        self.pop = pop
        self.needed_tokens = needed_tokens
        self.pending_prefill_tokens = pending_prefill_tokens
        """Uncached tokens of its prompt, as its router predicts."""
        self.prefill_ms = prefill_ms
        """Prefill time, as its router predicts."""
        self.objective = objective
        self.admitted_s = 0.0
        self.began_s = 0.0
        self.cached_tokens = 0
        self.work_left = 0.0
        self.first_token_at_s = 0.0
        self.generated_tokens = 0
        """Tokens that it had got when it was preempted; they are read again with the prompt."""
        self.given_at_join = 0.0

    @property
    def read_tokens(self) -> int:
        """Tokens to be read before its next token."""
        return self.request.prompt_tokens + self.generated_tokens


class EngineLoad(NamedTuple):
    """The load in an engine's own metrics: requests not begun, and the used share of KV memory."""

    waiting: int
    kv_usage: float


class SimulatedLoadReport(NamedTuple):
    """A replica's load that its node can report at one moment: a router gets the others' part."""

    load: ReportedLoad
    pending_by_pop: Mapping[int, int]
    decode_by_pop: Mapping[int, int]
    first_unanswered: ReplicaJob | None = None
    """The prompt without a first token that is read first."""
    last_prefill_end_s: float = 0.0
    kv_tokens: float = 0.0
    """KV memory of the sequences that run or are being read."""
    evicted_used_at_s: float = 0.0
    """The prefix cache has what was used since then."""

    def to_router(self, pop: int, at_s: float) -> ReportedLoad:
        """Return the load as reported to one router at `at_s`, as a node does (admission.py)."""
        pending = self.load.pending_prefill_tokens - self.pending_by_pop.get(pop, 0)
        if self.first_unanswered is not None and self.first_unanswered.pop != pop:
            pending -= tokens_read(self.first_unanswered, self.last_prefill_end_s, at_s)
        decode = self.load.decode_tokens - self.decode_by_pop.get(pop, 0)
        return structs.replace(
            self.load,
            others_pending_prefill_tokens=pending,
            others_decode_tokens=decode,
            cache_age_ms=round(1000 * max(0.0, at_s - self.evicted_used_at_s)),
        )
