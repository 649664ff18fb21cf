"""One replica: prompts read one by one in chunks, decodes beside them, an LRU prefix cache.

Between two events everything goes on at constant speed, so a replica jumps from event to event:
while a prompt is read, each step is a chunk of it and one token of every running sequence; else a
step is one token of each. Finishing times of sequences are kept in tokens each has to be given.
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
from ops.sim.traces import Request
from ops.sim.world import Site

BLOCK_TOKENS: Final = 16


class Job:
    """One request at a replica."""

    __slots__ = (
        "began_s",
        "cached_tokens",
        "first_at_s",
        "pop",
        "prefill_ms",
        "request",
        "unread",
        "wanted_tokens",
        "work_left",
    )

    def __init__(
        self, request: Request, wanted_tokens: int, unread: int, pop: int, prefill_ms: float
    ) -> None:
        self.request = request
        self.unread = unread
        """What of its prompt is not cached there, by its router's word."""
        self.pop = pop
        self.prefill_ms = prefill_ms
        """How long reading it takes, by its router's word."""
        self.began_s = 0.0
        self.wanted_tokens = wanted_tokens
        self.cached_tokens = 0
        self.work_left = 0.0
        self.first_at_s = 0.0


class Told(NamedTuple):
    """What a node could tell of a replica at some time: each router hears what is of others."""

    load: ReportedLoad
    unread: Mapping[int, int]
    decode: Mapping[int, int]
    reading: Job | None

    def to(self, pop: int, at_s: float) -> ReportedLoad:
        """Return the load as one router is told it at `at_s`; see nodeagent/decide/admission.py."""
        unread = self.load.pending_prefill_tokens - self.unread.get(pop, 0)
        job = self.reading
        if job is not None and job.pop != pop and job.prefill_ms > 0:
            share = 1000 * (at_s - job.began_s) / job.prefill_ms
            unread -= round(job.unread * max(0.0, min(PREFILL_SHARE_MAX, share)))
        decode = self.load.decode_tokens - self.decode.get(pop, 0)
        return structs.replace(
            self.load, others_pending_prefill_tokens=unread, others_decode_tokens=decode
        )


class Replica:
    """An engine with its door. Whoever runs it calls `settle` at the time that `next_at` tells."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.queue: deque[Job] = deque()
        self.reading: Job | None = None
        self.prefill_tokens = 0
        self.unread = 0
        self.decode_tokens = 0
        self.running = 0
        self.busy_s = 0.0
        self.tokens_read = 0.0
        self._now_s = 0.0
        self._given = 0.0
        """Tokens that a sequence there from the beginning would have been given."""
        self._decoding: list[tuple[float, int, Job]] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cached_tokens = 0
        self._unread_of: Counter[int] = Counter()
        self._decode_of: Counter[int] = Counter()
        self._log_at_s = [-1.0]
        self._log = [Told(ReportedLoad(0, 0, 0, 0, 0), {}, {}, None)]

    def __repr__(self) -> str:
        return f"Replica({self.site.replica}, {len(self.queue)} queued, {self.running} running)"

    def take(self, job: Job, now_s: float, queue_tokens_max: int = 0) -> bool:
        """Take a request on, as a node's door does; False where it does not fit or would wait."""
        tokens = self.prefill_tokens + self.decode_tokens
        if queue_tokens_max and self.left(now_s) > queue_tokens_max:
            return False
        if self.running and tokens + job.wanted_tokens > self.site.profile.kv_tokens_max:
            return False
        self._advance(now_s)
        self.running += 1
        self.prefill_tokens += job.request.prompt_tokens
        self.unread += job.unread
        self._unread_of[job.pop] += job.unread
        self.decode_tokens += job.wanted_tokens - job.request.prompt_tokens
        self._decode_of[job.pop] += job.wanted_tokens - job.request.prompt_tokens
        self.queue.append(job)
        if self.reading is None:
            self._read_next()
        self._note(now_s)
        return True

    def left(self, now_s: float) -> int:
        """Return what is still to be read, as the door reckons it."""
        return self._log[-1].to(-1, now_s).others_pending_prefill_tokens

    def settle(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Let time pass until now; return who got a first token and who ended."""
        self._advance(now_s)
        first, ended = [], []
        if self.reading is not None and self.reading.work_left <= 1e-6:
            job = self.reading
            job.first_at_s = now_s
            self.prefill_tokens -= job.request.prompt_tokens
            self.unread -= job.unread
            self._unread_of[job.pop] -= job.unread
            self._keep(job.request)
            heappush(
                self._decoding,
                (self._given + job.request.output_tokens - 1, job.request.number, job),
            )
            first.append(job)
            self._read_next()
        while self._decoding and self._decoding[0][0] <= self._given + 1e-6:
            job = heappop(self._decoding)[2]
            self.running -= 1
            self.decode_tokens -= job.wanted_tokens - job.request.prompt_tokens
            self._decode_of[job.pop] -= job.wanted_tokens - job.request.prompt_tokens
            ended.append(job)
        if self.reading is None:
            self._read_next()
        if first or ended:
            self._note(now_s)
        return first, ended

    def next_at(self) -> float:
        """Return when something happens next if nothing comes."""
        read_speed, decode_speed = self._speeds()
        at_s = inf
        if self.reading is not None:
            at_s = self._now_s + self.reading.work_left / read_speed
        if self._decoding:
            left = max(0.0, self._decoding[0][0] - self._given)
            at_s = min(at_s, self._now_s + left / decode_speed)
        return at_s

    def cached(self, request: Request, also: frozenset[int] | set[int] = frozenset()) -> int:
        """Return how many tokens of the prompt are cached; `also` are blocks that will be."""
        cache, count = self._cache, 0
        for block in request.blocks:
            if block not in cache and block not in also:
                break
            count += 1
        return min(count * request.block_tokens, request.prompt_tokens - 1)

    def work(self, request: Request, cached: int) -> float:
        """Return a prompt's work in tokens at the beginning of a prompt: deeper ones cost more.

        However short, it takes a step.
        """
        tokens = request.prompt_tokens
        depth = (tokens + cached) / 2
        profile = self.site.profile
        work = (tokens - cached) * (1 + depth / profile.attention_tokens)
        return max(work, profile.step_s * self.site.true_rate)

    def read_speed(self) -> float:
        """Return work per second while a prompt is read."""
        work, took_s = self._step()
        return work / took_s

    def load_at(self, at_s: float, pop: int) -> ReportedLoad:
        """Return the load as it was, as a node told it to a PoP's router."""
        return self._log[max(0, bisect_right(self._log_at_s, at_s) - 1)].to(pop, at_s)

    def _speeds(self) -> tuple[float, float]:
        profile = self.site.profile
        if self.reading is not None:
            work, took_s = self._step()
            return work / took_s, 1.0 / took_s
        step_s = profile.step_s + len(self._decoding) * profile.step_per_sequence_s
        return 0.0, 1.0 / step_s

    def _step(self) -> tuple[float, float]:
        """Return what of a prompt a step reads, and how long the step takes."""
        profile, rate = self.site.profile, self.site.true_rate
        decodes_s = len(self._decoding) * profile.step_per_sequence_s
        whole_s = profile.chunk_tokens / rate + decodes_s
        if not self._decoding or whole_s <= profile.interval_s:
            return profile.chunk_tokens, whole_s
        # The rest of the interval is the prompt's, and a block in any case.
        decodes_s += profile.step_s
        read_s = max(profile.interval_s - decodes_s, BLOCK_TOKENS / rate)
        return read_s * rate, read_s + decodes_s

    def _advance(self, now_s: float) -> None:
        took_s = now_s - self._now_s
        if took_s > 0:
            read_speed, decode_speed = self._speeds()
            if self.reading is not None:
                self.reading.work_left -= took_s * read_speed
                self.busy_s += took_s
            self._given += took_s * decode_speed
            self._now_s = now_s

    def _read_next(self) -> None:
        self.reading = None
        if self.queue and len(self._decoding) < self.site.profile.sequences_max:
            job = self.reading = self.queue.popleft()
            job.began_s = self._now_s
            job.cached_tokens = self.cached(job.request)
            job.work_left = self.work(job.request, job.cached_tokens)
            self.tokens_read += job.request.prompt_tokens - job.cached_tokens

    def _keep(self, request: Request) -> None:
        cache = self._cache
        for block in reversed(request.blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
                self._cached_tokens += request.block_tokens
        while self._cached_tokens > self.site.profile.cache_tokens:
            cache.popitem(last=False)
            self._cached_tokens -= request.block_tokens

    def _note(self, now_s: float) -> None:
        load = ReportedLoad(
            self.prefill_tokens, self.decode_tokens, self.running, len(self.queue), self.unread
        )
        self._log_at_s.append(now_s)
        told = Told(load, dict(self._unread_of), dict(self._decode_of), self.reading)
        self._log.append(told)
