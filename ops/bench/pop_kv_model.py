"""The possible gain of sharing KV in a PoP: the live benchmark (pop_kv) in simulated time.

    python -m ops.bench.pop_kv_model [--data FOLDER] [--requests N] [--draws N] [--load SHARE]

The router's code decides, and each replica has the engine's own block pool. Only time is modelled:
a replica reads one prompt after the other, beside its answers, at the rates that the live benchmark
measured. A run of minutes takes a second, so the table averages over many draws of sessions, and
compares what cannot be run: a router that knows what each replica really has, and replicas that
have one memory together.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import ReplicaId
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.scheduler.sequence_blocks import NEXT_PROMPTS_MAX
from ops.bench.disaggregation import TRACE
from ops.bench.pop_kv_causes import (
    CAUSES,
    LostPrefix,
    OneCache,
    SentPrefix,
    sent_prefix,
)
from ops.bench.pop_kv_requests import (
    SharedRequest,
    chain_keys,
    one_cache_hits,
    read_requests,
    turns_by_session,
)
from ops.bench.pop_kv_router import PopAttempt, PopRouter, ReplicaAddress
from ops.sim import data
from ops.sim.measure import percentile

NAMES: Final = ("a", "b", "c", "d")
BLOCKS: Final = 364
"""KV blocks of one replica, and its rates below: those of a live run on a quiet machine."""

PREFILL_TOKENS_PER_S: Final = 368.0
DECODE_TOKENS_PER_S: Final = 167.0
DECODE_SHARE: Final = 0.3
"""The part of its time that a replica spends on answers while it also reads a prompt."""

FETCH_S: Final = 0.03
FETCH_BLOCK_S: Final = 0.001
"""The time of a fetch, and of each block."""

STEP_S: Final = 0.01
PROBE_STEPS: Final = 100
RETRY_STEPS: Final = 5
SHARED_PROMPT_TOKENS_MIN: Final = 128


class Rules(NamedTuple):
    """One row of the comparison: the policy, and what the model grants beyond the product."""

    name: str
    policy: str
    knows_all: bool = False
    """The node asks every replica of the PoP, so that nothing held is missed."""
    has_one_memory: bool = False
    """The replicas have one memory together, of the same size."""


RULES: Final = (
    Rules("affinity", "affinity"),
    Rules("ours", "ours"),
    Rules("ours, sharing", "ours, sharing"),
    Rules("ours, sharing, every holder known", "ours, sharing", knows_all=True),
    Rules("ours, sharing, one memory", "ours, sharing", has_one_memory=True),
)


class ModelClock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> float:
        """Return the time."""
        return self.steps * STEP_S


class ModelRequest:
    """A request at a replica: the blocks that it has, and the seconds of work that it needs."""

    def __init__(self, sent: PopAttempt, began_s: float) -> None:
        """The client sent it at `began_s`."""
        self.sent = sent
        self.prefix = SentPrefix(0, 0, 0, 0)
        self.fetched_blocks = 0
        self.began_s = began_s
        self.chain = chain_keys(sent.shared.request.prompt)
        self.output_tokens = sent.shared.request.output_tokens
        self.blocks: list[int] = []
        self.cached_tokens = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.waited_s = 0.0
        self.ttft_s = 0.0


class Fetch(NamedTuple):
    """A fetch of the first `blocks` of a request's chain, which ends at `ends_s`."""

    request: ModelRequest
    target: "ModelReplica"
    holder: "ModelReplica"
    blocks: int
    ends_s: float


class ModelReplica:
    """An engine: its block pool, its queue, and what it computes."""

    def __init__(self, name: str, pool: BlockPool, clock: ModelClock) -> None:
        self.name = name
        self.pool = pool
        self.queue: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self._clock = clock

    def held_blocks(self, request: ModelRequest) -> int:
        """Return how many blocks of a request's prefix are cached."""
        return len(self.pool.match_prefix(request.chain))

    def load(self) -> ReportedLoad:
        """Return what the node would report."""
        pending_s = sum(request.prefill_s for request in self.running)
        queued = sum(request.sent.chosen.ranked.uncached_tokens for request in self.queue)
        return ReportedLoad(
            prefill_tokens=0,
            decode_tokens=sum(request.output_tokens for request in self.running),
            running=len(self.running),
            waiting=len(self.queue),
            pending_prefill_tokens=round(pending_s * PREFILL_TOKENS_PER_S) + queued,
            cache_age_ms=round(1000 * (self._clock() - self.pool.evicted_used_at_s)),
        )

    def wait(self, request: ModelRequest) -> None:
        """Queue a request, as the engine does."""
        self.pool.touch(request.chain)
        self.queue.append(request)

    def store(self, fetch: Fetch) -> None:
        """Store what a fetch brings, and have the holder evict it first."""
        chain = fetch.request.chain
        own = self.pool.match_prefix(chain)
        new = chain[len(own) : min(fetch.blocks, fetch.holder.held_blocks(fetch.request))]
        blocks = self.pool.allocate(own, len(new)) if new else None
        if blocks is None:
            return
        for block, digest in zip(blocks[len(own) :], new, strict=True):
            self.pool.cache(block, digest)
        self.pool.release(blocks)
        fetch.request.fetched_blocks = len(new)
        fetch.holder.pool.demote(chain[: fetch.blocks])

    def step(self) -> tuple[list[ModelRequest], list[ModelRequest]]:
        """Compute for STEP_S; return the requests whose first tokens came, and those that ended."""
        if self.queue and not any(request.prefill_s for request in self.running):
            self._start(self.queue[0])
        reading = next((request for request in self.running if request.prefill_s), None)
        decoding = [request for request in self.running if not request.prefill_s]
        share = 1.0 if reading is None else DECODE_SHARE if decoding else 0.0
        ended = []
        for request in decoding:
            request.decode_s -= share * STEP_S / len(decoding)
            if request.decode_s <= 0:
                ended.append(request)
                self.running.remove(request)
                self.pool.release(request.blocks)
        if reading is None:
            return [], ended
        reading.prefill_s = max(0.0, reading.prefill_s - (1 - share) * STEP_S)
        if reading.prefill_s:
            return [], ended
        for block, digest in zip(reading.blocks, reading.chain, strict=False):
            self.pool.cache(block, digest)
        return [reading], ended

    def _start(self, request: ModelRequest) -> None:
        cached = self.pool.match_prefix(request.chain)
        tokens = request.sent.tokens + request.output_tokens
        fresh = -(-tokens // BLOCK_TOKENS) - len(cached)
        if not self.pool.fits(cached, fresh):
            return
        # As the engine does (`SequenceBlocks.admit`).
        for waiting in reversed(self.queue[:NEXT_PROMPTS_MAX]):
            self.pool.touch(waiting.chain)
        blocks = self.pool.allocate(cached, fresh)
        assert blocks is not None
        self.queue.remove(request)
        request.blocks, request.cached_tokens = blocks, BLOCK_TOKENS * len(cached)
        uncached = request.sent.tokens - request.cached_tokens
        request.prefill_s = uncached / PREFILL_TOKENS_PER_S
        request.decode_s = request.output_tokens / DECODE_TOKENS_PER_S
        self.running.append(request)


@dataclass(frozen=True)
class ModelResult:
    """The figures of one run; shares in percent of the prompts' tokens, times in milliseconds."""

    hits: float
    lost: tuple[float, ...]
    """By CAUSES."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    balance: float


class PopModel:
    """One run: the requests of one draw under one set of rules."""

    def __init__(self, requests: Sequence[SharedRequest], rules: Rules, speed: float) -> None:
        """Send the requests `speed` times as fast as in the trace."""
        self._clock = ModelClock()
        self._rules = rules
        self._due = {turns[0].session: list(turns) for turns in turns_by_session(requests)}
        self._speed = speed
        self._retry_at_step: dict[str, int] = {}
        """For each session whose next request was refused, when it is sent again."""
        addresses = [ReplicaAddress(name, f"{name}:1") for name in NAMES]
        self._router = PopRouter(addresses, rules.policy, PREFILL_TOKENS_PER_S, self._clock)
        pools = [BlockPool(BLOCKS, self._clock) for _ in NAMES]
        if rules.has_one_memory:
            pools = [BlockPool(BLOCKS * len(NAMES), self._clock)] * len(NAMES)
        self._replicas = {
            name: ModelReplica(name, pool, self._clock)
            for name, pool in zip(NAMES, pools, strict=True)
        }
        self._fetches: list[Fetch] = []
        self._waiting_since_s: dict[str, float] = {}
        """For each session with a request that has no answer yet, when the client sent it."""
        self._one_cache = OneCache(BLOCKS * len(NAMES))
        self._answers: list[ModelRequest] = []

    def run(self) -> ModelResult:
        """Send all requests, and return the figures."""
        while self._due or self._waiting_since_s:
            self._send_due()
            for fetch in [fetch for fetch in self._fetches if fetch.ends_s <= self._clock()]:
                self._fetches.remove(fetch)
                fetch.target.store(fetch)
                fetch.request.waited_s = self._clock() - fetch.request.sent.sent_at_s
                fetch.target.wait(fetch.request)
            for replica in self._replicas.values():
                self._compute(replica)
            if self._clock.steps % PROBE_STEPS == 0:
                for name, replica in self._replicas.items():
                    self._router.record_loads(name, {ReplicaId(name): replica.load()})
            self._router.sample()
            self._clock.steps += 1
        prompt = sum(request.sent.tokens for request in self._answers)
        cached = sum(request.cached_tokens for request in self._answers)
        ttft_ms = [1000 * request.ttft_s for request in self._answers]
        lost = zip(*map(_lost, self._answers), strict=True)
        return ModelResult(
            100 * cached / prompt,
            tuple(100 * BLOCK_TOKENS * sum(column) / prompt for column in lost),
            percentile(ttft_ms, 0.5),
            percentile(ttft_ms, 0.9),
            self._router.balance(),
        )

    def _send_due(self) -> None:
        """Send the next request of each session whose time has come and that waits for none."""
        for session, turns in list(self._due.items()):
            is_due = turns[0].request.at_s / self._speed <= self._clock()
            if not is_due or self._retry_at_step.get(session, 0) > self._clock.steps:
                continue
            if session in self._waiting_since_s and session not in self._retry_at_step:
                continue
            began_s = self._waiting_since_s.setdefault(session, self._clock())
            chosen = self._router.choose(turns[0], 0)
            if chosen is None:
                self._retry_at_step[session] = self._clock.steps + RETRY_STEPS
                continue
            self._retry_at_step.pop(session, None)
            request = ModelRequest(self._router.send(turns.pop(0), chosen), began_s)
            if not turns:
                del self._due[session]
            self._arrive(request)

    def _arrive(self, request: ModelRequest) -> None:
        """Queue a request at its replica, after a fetch if another one has more of its prefix."""
        target = self._replicas[request.sent.route.replica_id]
        others = [replica for replica in self._replicas.values() if replica is not target]
        named = [peer.replica_id for peer in request.sent.chosen.peers.replicas]
        asked = [replica for replica in others if replica.name in named]
        if self._rules.knows_all and request.sent.tokens >= SHARED_PROMPT_TOKENS_MIN:
            asked = others
        held = {name: replica.held_blocks(request) for name, replica in self._replicas.items()}
        in_one_cache = self._one_cache.use(request.chain)
        names = [replica.name for replica in asked]
        request.prefix = sent_prefix(in_one_cache, held, target.name, names)
        own = target.held_blocks(request)
        found = max([replica.held_blocks(request) for replica in asked], default=0)
        if found <= own:
            target.wait(request)
            return
        holder = max(asked, key=lambda replica: replica.held_blocks(request))
        ends_s = self._clock() + FETCH_S + FETCH_BLOCK_S * (found - own)
        self._fetches.append(Fetch(request, target, holder, found, ends_s))

    def _compute(self, replica: ModelReplica) -> None:
        first, ended = replica.step()
        now_s = self._clock() + STEP_S
        for request in first:
            request.ttft_s = now_s - request.began_s
            self._router.record_first_token(request.sent, replica.load())
        for request in ended:
            self._router.close(request.sent)
            self._router.learn(request.sent, request.cached_tokens, 1000 * request.waited_s)
            del self._waiting_since_s[request.sent.shared.session]
            self._answers.append(request)


def _lost(request: ModelRequest) -> LostPrefix:
    cached = request.cached_tokens // BLOCK_TOKENS
    return request.prefix.lost(request.fetched_blocks, cached)


def run_draw(requests: Sequence[SharedRequest], rules: Rules, load: float) -> ModelResult:
    """Run the requests at this load."""
    prompt = sum(len(shared.request.prompt) for shared in requests)
    outputs = sum(shared.request.output_tokens for shared in requests)
    uncached = prompt * (1 - one_cache_hits(requests, BLOCKS * len(NAMES)))
    busy_s = uncached / PREFILL_TOKENS_PER_S + outputs / DECODE_TOKENS_PER_S
    speed = requests[-1].request.at_s / (busy_s / len(NAMES) / load)
    return PopModel(requests, rules, speed).run()


def measure(trace: Path, count: int, draws: int, load: float) -> None:
    """Print the table."""
    drawn = [read_requests(trace, count, str(draw)) for draw in range(draws)]
    ideal = fmean(100 * one_cache_hits(requests, BLOCKS * len(NAMES)) for requests in drawn)
    print(
        f"{draws} draws of {count} requests, load {load:g}, {len(NAMES)} replicas of {BLOCKS}"
        f" blocks\n\n| choice | hits % | {' % | '.join(CAUSES)} % | TTFT p50 ms | p90"
        f" | tokens in flight max/mean |\n|{'---|' * (5 + len(CAUSES))}\n"
        f"| one cache of {BLOCKS * len(NAMES)} blocks | {ideal:.1f} |{' |' * (3 + len(CAUSES))}"
    )
    for rules in RULES:
        results = [run_draw(requests, rules, load) for requests in drawn]
        causes = zip(*(r.lost for r in results), strict=True)
        print(
            f"| {rules.name} | {fmean(r.hits for r in results):.1f}"
            f" | {' | '.join(f'{fmean(cause):.1f}' for cause in causes)}"
            f" | {fmean(r.ttft_p50_ms for r in results):.0f}"
            f" | {fmean(r.ttft_p90_ms for r in results):.0f}"
            f" | {fmean(r.balance for r in results):.2f} |",
            flush=True,
        )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.pop_kv_model")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--load", type=float, default=0.6)
    arguments = parser.parse_args()
    trace = data.folder(arguments.data) / TRACE
    measure(trace, arguments.requests, arguments.draws, arguments.load)


if __name__ == "__main__":
    main()
