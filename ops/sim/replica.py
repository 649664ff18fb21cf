"""One simulated replica: prefill in chunks, one prompt at a time, beside decoding, and a cache.

Between two events everything goes on at constant speed, so a replica jumps from event to event.
While a prompt is read, each step is a chunk of it and one token of every running sequence; else a
step is one token of each sequence. The end of a sequence is kept in tokens it has yet to get.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from msgspec import structs

from isochrone.wire.headers import ReportedLoad
from nodeagent.decide.admission import PREFILL_SHARE_MAX
from ops.sim.traces import TraceRequest
from ops.sim.world import ReplicaSite

BLOCK_TOKENS: Final = 16
ALL_ROUTERS: Final = -1
"""Stands for a PoP without requests: to it, every token is another router's."""

_TOLERANCE: Final = 1e-6


class ReplicaJob:
    """One request at a replica."""

    __slots__ = (
        "began_s", "cached_tokens", "first_token_at_s", "needed_tokens", "pending_prefill_tokens",
        "pop", "prefill_ms", "request", "work_left",
    )  # fmt: skip

    def __init__(
        self,
        request: TraceRequest,
        needed_tokens: int,
        pending_prefill_tokens: int,
        pop: int,
        prefill_ms: float,
    ) -> None:
        self.request = request
        self.pop = pop
        self.needed_tokens = needed_tokens
        self.pending_prefill_tokens = pending_prefill_tokens
        """Uncached tokens of its prompt, as its router predicts."""
        self.prefill_ms = prefill_ms
        """Prefill time, as its router predicts."""
        self.began_s = 0.0
        self.cached_tokens = 0
        self.work_left = 0.0
        self.first_token_at_s = 0.0


class SimulatedLoadReport(NamedTuple):
    """What a node can report of a replica at one moment: each router is told the others' part."""

    load: ReportedLoad
    pending_by_pop: Mapping[int, int]
    decode_by_pop: Mapping[int, int]
    reading: ReplicaJob | None

    def to_router(self, pop: int, at_s: float) -> ReportedLoad:
        """Return the load as reported to one router at `at_s` (nodeagent/decide/admission.py)."""
        pending = self.load.pending_prefill_tokens - self.pending_by_pop.get(pop, 0)
        job = self.reading
        if job is not None and job.pop != pop and job.prefill_ms > 0:
            share = 1000 * (at_s - job.began_s) / job.prefill_ms
            pending -= round(job.pending_prefill_tokens * max(0.0, min(PREFILL_SHARE_MAX, share)))
        decode = self.load.decode_tokens - self.decode_by_pop.get(pop, 0)
        return structs.replace(
            self.load, others_pending_prefill_tokens=pending, others_decode_tokens=decode
        )


class StepProgress(NamedTuple):
    """One step that reads a part of a prompt: how much work it does, and how long it takes."""

    work: float
    took_s: float


class StepEvents(NamedTuple):
    """The jobs that got their first token at an event, and those that ended."""

    first_tokens: list[ReplicaJob]
    ended: list[ReplicaJob]


class SimulatedReplica:
    """An engine and the admission of its node. Call `settle` at the time `next_event_s` returns."""

    def __init__(self, site: ReplicaSite) -> None:
        self.site = site
        self.queue: deque[ReplicaJob] = deque()
        self.reading: ReplicaJob | None = None
        self.prefill_tokens = 0
        self.pending_prefill_tokens = 0
        self.decode_tokens = 0
        self.running = 0
        self.busy_s = 0.0
        self._now_s = 0.0
        self._tokens_given = 0.0
        """Tokens that a sequence running from the beginning would have got."""
        self._decoding: list[tuple[float, int, ReplicaJob]] = []
        """Heap of (tokens given at its end, number, job)."""
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cache_tokens = 0
        self._pending_by_pop: Counter[int] = Counter()
        self._decode_by_pop: Counter[int] = Counter()
        self._history_at_s = [-1.0]
        self._history = [SimulatedLoadReport(ReportedLoad(0, 0, 0, 0, 0), {}, {}, None)]

    def __repr__(self) -> str:
        queued = f"{len(self.queue)} queued, {self.running} running"
        return f"SimulatedReplica({self.site.replica}, {queued})"

    def admit(self, job: ReplicaJob, now_s: float, queue_tokens_max: int = 0) -> bool:
        """Admit a request, as a node does; return False if it does not fit or would wait.

        `queue_tokens_max` limits the tokens before it; 0 for no limit.
        """
        tokens = self.prefill_tokens + self.decode_tokens
        if queue_tokens_max and self.queued_tokens(now_s) > queue_tokens_max:
            return False
        if self.running and tokens + job.needed_tokens > self.site.profile.kv_tokens_max:
            return False
        self._advance(now_s)
        self.running += 1
        self.prefill_tokens += job.request.prompt_tokens
        self.pending_prefill_tokens += job.pending_prefill_tokens
        self._pending_by_pop[job.pop] += job.pending_prefill_tokens
        self.decode_tokens += job.needed_tokens - job.request.prompt_tokens
        self._decode_by_pop[job.pop] += job.needed_tokens - job.request.prompt_tokens
        self.queue.append(job)
        if self.reading is None:
            self._read_next()
        self._record_load(now_s)
        return True

    def queued_tokens(self, now_s: float) -> int:
        """Return the prompt tokens still to be read, as the node estimates them."""
        return self._history[-1].to_router(ALL_ROUTERS, now_s).others_pending_prefill_tokens

    def settle(self, now_s: float) -> StepEvents:
        """Let time pass until now; return the jobs with a first token and those that ended."""
        self._advance(now_s)
        events = StepEvents([], [])
        if self.reading is not None and self.reading.work_left <= _TOLERANCE:
            job = self.reading
            job.first_token_at_s = now_s
            self.prefill_tokens -= job.request.prompt_tokens
            self.pending_prefill_tokens -= job.pending_prefill_tokens
            self._pending_by_pop[job.pop] -= job.pending_prefill_tokens
            self._cache_prompt(job.request)
            ends_at = self._tokens_given + job.request.output_tokens - 1
            heappush(self._decoding, (ends_at, job.request.number, job))
            events.first_tokens.append(job)
            self._read_next()
        while self._decoding and self._decoding[0][0] <= self._tokens_given + _TOLERANCE:
            job = heappop(self._decoding)[2]
            self.running -= 1
            self.decode_tokens -= job.needed_tokens - job.request.prompt_tokens
            self._decode_by_pop[job.pop] -= job.needed_tokens - job.request.prompt_tokens
            events.ended.append(job)
        if self.reading is None:
            self._read_next()
        if events.first_tokens or events.ended:
            self._record_load(now_s)
        return events

    def next_event_s(self) -> float:
        """Return the time of the next event if no request arrives; infinite if there is none."""
        read_speed, decode_speed = self._read_speed(), self._decode_speed()
        at_s = inf
        if self.reading is not None:
            at_s = self._now_s + self.reading.work_left / read_speed
        if self._decoding:
            left = max(0.0, self._decoding[0][0] - self._tokens_given)
            at_s = min(at_s, self._now_s + left / decode_speed)
        return at_s

    def cached(
        self, request: TraceRequest, blocks_to_come: frozenset[int] | set[int] = frozenset()
    ) -> int:
        """Return how many tokens of the prompt are cached, counting also `blocks_to_come`."""
        cache, count = self._cache, 0
        for block in request.blocks:
            if block not in cache and block not in blocks_to_come:
                break
            count += 1
        return min(count * request.block_tokens, request.prompt_tokens - 1)

    def work(self, request: TraceRequest, cached: int) -> float:
        """Return a prompt's prefill work in tokens at the beginning of a prompt.

        Deeper tokens cost more; a short prompt takes at least one step.
        """
        tokens = request.prompt_tokens
        depth = (tokens + cached) / 2
        profile = self.site.profile
        work = (tokens - cached) * (1 + depth / profile.attention_tokens)
        return max(work, profile.step_s * self.site.true_rate)

    def read_speed(self) -> float:
        """Return the prefill work per second while a prompt is read."""
        step = self._prefill_step()
        return step.work / step.took_s

    def load_at(self, at_s: float, pop: int) -> ReportedLoad:
        """Return the load at `at_s` as it is reported to a PoP's router."""
        index = max(0, bisect_right(self._history_at_s, at_s) - 1)
        return self._history[index].to_router(pop, at_s)

    def _read_speed(self) -> float:
        return self.read_speed() if self.reading is not None else 0.0

    def _decode_speed(self) -> float:
        """Return the tokens per second that each running sequence gets."""
        if self.reading is not None:
            return 1.0 / self._prefill_step().took_s
        profile = self.site.profile
        return 1.0 / (profile.step_s + len(self._decoding) * profile.step_per_sequence_s)

    def _prefill_step(self) -> StepProgress:
        """Return what a step reads of a prompt, and how long it takes."""
        profile, rate = self.site.profile, self.site.true_rate
        decodes_s = len(self._decoding) * profile.step_per_sequence_s
        whole_s = profile.chunk_tokens / rate + decodes_s
        if not self._decoding or whole_s <= profile.interval_s:
            return StepProgress(profile.chunk_tokens, whole_s)
        # The prompt gets the rest of the interval, and at least one block.
        decodes_s += profile.step_s
        read_s = max(profile.interval_s - decodes_s, BLOCK_TOKENS / rate)
        return StepProgress(read_s * rate, read_s + decodes_s)

    def _advance(self, now_s: float) -> None:
        took_s = now_s - self._now_s
        if took_s > 0:
            read_speed, decode_speed = self._read_speed(), self._decode_speed()
            if self.reading is not None:
                self.reading.work_left -= took_s * read_speed
                self.busy_s += took_s
            self._tokens_given += took_s * decode_speed
            self._now_s = now_s

    def _read_next(self) -> None:
        self.reading = None
        if self.queue and len(self._decoding) < self.site.profile.sequences_max:
            job = self.reading = self.queue.popleft()
            job.began_s = self._now_s
            job.cached_tokens = self.cached(job.request)
            job.work_left = self.work(job.request, job.cached_tokens)

    def _cache_prompt(self, request: TraceRequest) -> None:
        """Put a prompt's blocks into the cache, and evict the least recently used."""
        cache = self._cache
        for block in reversed(request.blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
                self._cache_tokens += request.block_tokens
        while self._cache_tokens > self.site.profile.cache_tokens:
            cache.popitem(last=False)
            self._cache_tokens -= request.block_tokens

    def _record_load(self, now_s: float) -> None:
        load = ReportedLoad(
            self.prefill_tokens,
            self.decode_tokens,
            self.running,
            len(self.queue),
            self.pending_prefill_tokens,
        )
        self._history_at_s.append(now_s)
        self._history.append(
            SimulatedLoadReport(
                load, dict(self._pending_by_pop), dict(self._decode_by_pop), self.reading
            )
        )
