"""One simulated replica: prefill in chunks, one prompt at a time, beside decoding, and a cache.

Between two events everything goes on at constant speed, so a replica jumps from event to event.
While a prompt is read, each step is a chunk of it and one token of every running sequence; else a
step is one token of each sequence. The end of a sequence is kept in tokens it has yet to get.

Where one pool holds cached prefixes and running sequences, a prompt waits until it fits, and when
the running sequences outgrow the pool the newest is preempted: it is read again from the beginning,
with what it had generated, as in vLLM.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, NamedTuple

from isochrone.wire.http.headers import ReportedLoad
from nodeagent.decide.requests.prefill_pace import PrefillPace
from ops.sim.replica_job import ALL_ROUTERS, EngineLoad, ReplicaJob, SimulatedLoadReport
from ops.sim.replica_memory import SharedPrefixEvent, replica_memory
from ops.sim.traces import TraceRequest
from ops.sim.world import ReplicaSite

BLOCK_TOKENS: Final = 16
TOLERANCE: Final = 1e-6


class StepProgress(NamedTuple):
    """One step that reads a part of a prompt: how much work it does, and how long it takes."""

    work: float
    took_s: float


class StepEvents(NamedTuple):
    """The jobs that got their first token at an event, and those that ended."""

    first_tokens: list[ReplicaJob]
    ended: list[ReplicaJob]


class SimulatedReplica:
    """An engine and the admission of its node. Call `settle` at the time `next_event_s` returns.

    `queue_order` is the sort key of its queue, the smallest is read next.
    """

    def __init__(self, site: ReplicaSite, queue_order: "QueueOrder | None" = None) -> None:
        self.site = site
        self._queue_order = queue_order or due_order
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
        self._memory = replica_memory(site.profile)
        self._context_base = 0.0
        """With the tokens given to each running sequence added, the sum of their contexts."""
        self._joined_tokens = 0
        """The sum of the contexts of the running sequences when they began to decode."""
        self._pending_by_pop: Counter[int] = Counter()
        self._decode_by_pop: Counter[int] = Counter()
        self._last_prefill_end_s = 0.0
        self._pace = PrefillPace()
        self._history_at_s = [-1.0]
        self._history = [SimulatedLoadReport(ReportedLoad(0, 0, 0, 0, 0), {}, {})]

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
        job.admitted_s = now_s
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
        if self.reading is not None and self.reading.work_left <= TOLERANCE:
            self._end_reading(self.reading, events)
            self._read_next()
        self._end_answers(events)
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
            if self._must_preempt():
                free = self._memory.free_tokens(self._grown_tokens())
                full_s = max(0.0, free) / (len(self._decoding) * decode_speed)
                at_s = min(at_s, self._now_s + full_s)
        return at_s

    def lose(self) -> list[ReplicaJob]:
        """Lose all requests and the cache: the replica dies. Return the requests."""
        lost = [*self.queue, *(entry[2] for entry in self._decoding)]
        if self.reading is not None:
            lost.append(self.reading)
        self.queue.clear()
        self._decoding.clear()
        self.reading = None
        self.prefill_tokens = self.pending_prefill_tokens = self.decode_tokens = self.running = 0
        self._context_base, self._joined_tokens = 0.0, 0
        self._pending_by_pop.clear()
        self._decode_by_pop.clear()
        self._memory.clear()
        return lost

    def generated(self, job: ReplicaJob) -> int:
        """Return how many tokens a sequence had got when it was lost or preempted."""
        return job.generated_tokens + 1 + int(self._tokens_given - job.given_at_join)

    def restart(self, now_s: float) -> None:
        """Serve again, with an empty cache."""
        self._now_s = self._memory.now_s = now_s
        self._memory.clear()
        self._record_load(now_s)

    def cached(self, request: TraceRequest, blocks_to_come: Set[int] = frozenset()) -> int:
        """Return how many tokens of the prompt are cached, counting also `blocks_to_come`."""
        count = self._memory.matched_blocks(request, blocks_to_come)
        return min(count * request.block_tokens, request.prompt_tokens - 1)

    def work(self, request: TraceRequest, cached: int, generated_tokens: int = 0) -> float:
        """Return a prompt's prefill work in tokens at its beginning; at least that of a step."""
        work = self._tokens_work(request, cached, generated_tokens)
        return max(work, self.site.profile.step_s * self.site.true_rate)

    def read_speed(self) -> float:
        """Return the prefill work per second while a prompt is read."""
        step = self._prefill_step()
        return step.work / step.took_s

    def work_left(self, now_s: float) -> float:
        """Return how much of the prompt being read is left now, in tokens."""
        if self.reading is None:
            return 0.0
        return max(0.0, self.reading.work_left - (now_s - self._now_s) * self._read_speed())

    def load_at(self, at_s: float, pop: int) -> ReportedLoad:
        """Return the load at `at_s` as it is reported to a PoP's router."""
        return self._report_at(at_s).to_router(pop, at_s)

    def engine_load_at(self, at_s: float) -> EngineLoad:
        """Return the engine's own metrics at `at_s`."""
        report, profile = self._report_at(at_s), self.site.profile
        tokens_max = profile.pool_tokens or profile.kv_tokens_max
        return EngineLoad(report.load.waiting, min(1.0, report.kv_tokens / tokens_max))

    @property
    def shared_prefix_events(self) -> Sequence[SharedPrefixEvent]:
        """Events of the prefixes that several prompts have in common, oldest first."""
        return self._memory.events

    def _tokens_work(self, request: TraceRequest, cached: int, generated_tokens: int) -> float:
        # Deeper tokens cost more.
        tokens = request.prompt_tokens + generated_tokens
        depth = (tokens + cached) / 2
        return (tokens - cached) * (1 + depth / self.site.profile.attention_tokens)

    def _report_at(self, at_s: float) -> SimulatedLoadReport:
        return self._history[max(0, bisect_right(self._history_at_s, at_s) - 1)]

    def _read_speed(self) -> float:
        return self.read_speed() if self.reading is not None else 0.0

    def _decode_speed(self) -> float:
        """Return the tokens per second that each running sequence gets."""
        if self.reading is not None:
            return 1.0 / self._prefill_step().took_s
        profile = self.site.profile
        return 1.0 / (profile.step_s + self._decodes_s())

    def _decodes_s(self) -> float:
        """Return what the running sequences add to a step."""
        profile = self.site.profile
        took_s = len(self._decoding) * profile.step_per_sequence_s
        if profile.step_per_context_token_s:
            took_s += self._context_tokens() * profile.step_per_context_token_s
        return took_s

    def _context_tokens(self) -> float:
        return self._context_base + len(self._decoding) * self._tokens_given

    def _grown_tokens(self) -> float:
        """Return what the running sequences have got since they began to decode."""
        return self._context_tokens() - self._joined_tokens

    def _prefill_step(self) -> StepProgress:
        """Return what a step reads of a prompt, and how long it takes."""
        profile, rate, decodes_s = self.site.profile, self.site.true_rate, self._decodes_s()
        whole_s = profile.chunk_tokens / rate + decodes_s
        if not self._decoding or whole_s <= profile.interval_s:
            return StepProgress(profile.chunk_tokens, whole_s)
        # The prompt gets the rest of the interval, and at least one block.
        decodes_s += profile.step_s
        read_s = max(profile.interval_s - decodes_s, BLOCK_TOKENS / rate)
        return StepProgress(read_s * rate, read_s + decodes_s)

    def _advance(self, now_s: float) -> None:
        if (took_s := now_s - self._now_s) > 0:
            read_speed, decode_speed = self._read_speed(), self._decode_speed()
            if self.reading is not None:
                self.reading.work_left -= took_s * read_speed
                self.busy_s += took_s
            self._tokens_given += took_s * decode_speed
            self._now_s = self._memory.now_s = now_s

    def _read_next(self) -> None:
        self.reading = None
        if (job := self._beginning()) is not None:
            self.reading = job
            job.work_left = self.work(job.request, self._hold(job), job.generated_tokens)

    def _beginning(self) -> ReplicaJob | None:
        """Return the queued request that can begin to be read now, if there is any."""
        if not self.queue or len(self._decoding) >= self.site.profile.sequences_max:
            return None
        job = self._next_in_queue()
        if self._decoding and not self._memory.has_room(
            job.request, job.generated_tokens, self._grown_tokens()
        ):
            return None
        return job

    def _hold(self, job: ReplicaJob) -> int:
        """Take a request from the queue and memory for it; return how many tokens are cached."""
        self.queue.remove(job)
        job.began_s = self._now_s
        self._memory.trim(self._grown_tokens())
        cached_tokens = self.cached(job.request)
        if not job.first_token_at_s:
            job.cached_tokens = cached_tokens
        self._memory.hold(job.request, job.generated_tokens)
        return cached_tokens

    def _next_in_queue(self) -> ReplicaJob:
        """Return the queued request to read next: a preempted one, or the first by the order."""
        if len(self.queue) == 1 or self.queue[0].first_token_at_s:
            return self.queue[0]
        return min(self.queue, key=lambda job: self._queue_order(self, job, self._now_s))

    def _begin_decoding(self, job: ReplicaJob) -> None:
        left = job.request.output_tokens - 1 - job.generated_tokens
        heappush(self._decoding, (self._tokens_given + left, job.request.number, job))
        job.given_at_join = self._tokens_given
        self._joined_tokens += job.read_tokens
        self._context_base += job.read_tokens - job.given_at_join

    def _end_decoding(self, job: ReplicaJob) -> None:
        """Take a sequence that is no longer on the heap out of the sums."""
        self._joined_tokens -= job.read_tokens
        self._context_base -= job.read_tokens - job.given_at_join
        self._memory.release(job.request, job.generated_tokens)

    def _end_reading(self, job: ReplicaJob, events: StepEvents) -> None:
        """Let a prompt that was read begin to decode."""
        if not job.first_token_at_s:
            job.first_token_at_s = self._now_s
            self.prefill_tokens -= job.request.prompt_tokens
            self.pending_prefill_tokens -= job.pending_prefill_tokens
            self._pending_by_pop[job.pop] -= job.pending_prefill_tokens
            self._measure_pace(job)
            self._last_prefill_end_s = self._now_s
            events.first_tokens.append(job)
        self._memory.put(job.request, self._grown_tokens())
        self._begin_decoding(job)

    def _measure_pace(self, job: ReplicaJob) -> None:
        """Take the time of a prompt, as its node does."""
        took_s = self._now_s - max(job.admitted_s, self._last_prefill_end_s)
        self._pace.record(job.pending_prefill_tokens, took_s, self._now_s)

    def _end_answers(self, events: StepEvents) -> None:
        """End the sequences that have all of their tokens; preempt some if the pool is full."""
        while self._decoding and self._decoding[0][0] <= self._tokens_given + TOLERANCE:
            job = heappop(self._decoding)[2]
            self._end_decoding(job)
            self.running -= 1
            self.decode_tokens -= job.needed_tokens - job.request.prompt_tokens
            self._decode_by_pop[job.pop] -= job.needed_tokens - job.request.prompt_tokens
            events.ended.append(job)
        while self._must_preempt() and self._memory.free_tokens(self._grown_tokens()) <= 0.5:
            self._preempt_newest()

    def _must_preempt(self) -> bool:
        """Return whether a full pool would stop a sequence: one alone goes on."""
        running = len(self._decoding) + (self.reading is not None)
        return self.site.profile.pool_tokens > 0 and bool(self._decoding) and running > 1

    def _preempt_newest(self) -> None:
        """Put the sequence that began last back to the head of the queue."""
        newest = max(self._decoding, key=lambda entry: (entry[2].began_s, entry[1]))
        job = newest[2]
        if self.reading is not None and self.reading.began_s >= job.began_s:
            job, self.reading = self.reading, None
            self._memory.release(job.request, job.generated_tokens, is_read=False)
        else:
            self._decoding.remove(newest)
            heapify(self._decoding)
            self._end_decoding(job)
            job.generated_tokens = self.generated(job)
        self.queue.appendleft(job)

    def _first_unanswered(self) -> ReplicaJob | None:
        """Return the request that gets the next first token."""
        if self.reading is not None and not self.reading.first_token_at_s:
            return self.reading
        return next((job for job in self.queue if not job.first_token_at_s), None)

    def _record_load(self, now_s: float) -> None:
        load = ReportedLoad(
            self.prefill_tokens,
            self.decode_tokens,
            self.running,
            len(self.queue),
            self.pending_prefill_tokens,
            prefill_ns_per_token=self._pace.ns_per_token(now_s),
        )
        self._history_at_s.append(now_s)
        self._history.append(
            SimulatedLoadReport(
                load,
                dict(self._pending_by_pop),
                dict(self._decode_by_pop),
                self._first_unanswered(),
                self._last_prefill_end_s,
                self._context_tokens() + (self.reading.read_tokens if self.reading else 0),
                self._memory.evicted_used_at_s,
            )
        )


QueueOrder = Callable[[SimulatedReplica, ReplicaJob, float], float]
"""Sort key of a request in a replica's queue now; of equal ones the first to arrive is first."""


ReplicaKind = Callable[[ReplicaSite, QueueOrder | None], SimulatedReplica]
"""A model of a replica."""


def due_order(_replica: SimulatedReplica, job: ReplicaJob, now_s: float) -> float:
    """Order by when first tokens are due, as nodes and the embedded engine do."""
    return job.objective.counts_due_s(now_s)
