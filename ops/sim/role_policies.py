"""Policies for replicas with roles: the router's own code, rivals with their own rules, an oracle.

llm-d: the decode profile first, then the prefill profile if at least so many tokens of the prompt
are not cached at the decode replica (llm-d-inference-scheduler 06c08c08, pkg/plugins/profile:
pd_profile_handler.go and prefix_based_pd_decider.go; its default is 0, always). Scores as rivals.py
has them. Static ratio: both replicas in turn, always two legs. Both policies take the PoP that is
nearest and not saturated, by its decode replicas.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.peers.assignment import Role
from ops.sim.isochrone_policy import DEPLOYMENT, IsochronePolicy
from ops.sim.replica_job import EngineLoad
from ops.sim.rivals import LlmdPolicy, PopRival, RivalPolicy
from ops.sim.role_replica import RoleReplica
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.replicas.tokens_in_flight import Reservation

LLMD_THRESHOLD: Final = 0
"""llm-d's default of `nonCachedTokens`."""


class RolesPolicy(IsochronePolicy):
    """The router's own code, which names prefill replicas and counts their tokens."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._reads: dict[int, Reservation] = {}
        """For each request, the reservation at the prefill replica that reads its prompt."""
        self._read_elsewhere: set[int] = set()

    def prefill_candidates(self, request: TraceRequest, now_s: float) -> Sequence[PeerReplica]:
        """Return the replica that was chosen, and those that may read the prompt for it."""
        readers = self.fleet.routing(DEPLOYMENT).prefill_replicas
        if not readers:
            return ()
        ranked = self._in_flight[request.number].ranked
        return readers.candidates(
            ranked, request.prompt_tokens, self.fleet.in_flight, frozenset(), now_s
        )

    def record_prefill(self, request: TraceRequest, replica: int) -> None:
        """Move the prompt's tokens to the replica that reads it."""
        sent = self._in_flight.get(request.number)
        if sent is None:
            return
        sent.reservation.finish_prefill()
        self._end_read(request)
        self._read_elsewhere.add(request.number)
        self._reads[request.number] = self.fleet.in_flight.reserve(
            self._routes[replica].replica_id, prefill=request.prompt_tokens, decode=0
        )

    def record_first_token(self, request: TraceRequest, now_s: float) -> None:
        """Learn from a first token, unless another replica read the prompt."""
        self._end_read(request)
        if request.number not in self._read_elsewhere:
            super().record_first_token(request, now_s)

    def record_end(self, request: TraceRequest, cached_tokens: int, now_s: float) -> None:
        """Release what was booked; learn what was cached unless another replica read it."""
        self._end_read(request)
        if request.number not in self._read_elsewhere:
            super().record_end(request, cached_tokens, now_s)
            return
        self._read_elsewhere.remove(request.number)
        sent = self._in_flight.pop(request.number)
        sent.reservation.release()
        self.bind_session(request, sent, now_s)

    def record_refusal(self, request: TraceRequest, at_s: float) -> None:
        """Release what was booked."""
        self._end_read(request)
        self._read_elsewhere.discard(request.number)
        super().record_refusal(request, at_s)

    def _end_read(self, request: TraceRequest) -> None:
        reservation = self._reads.pop(request.number, None)
        if reservation is not None:
            reservation.release()


def readers_of(router: SimulatedRouter, replica: int) -> list[int]:
    """Return the prefill replicas in a replica's PoP."""
    sites = router.world.sites
    pop = sites[replica].pop
    return [site.replica for site in sites if site.pop == pop and site.role is Role.PREFILL]


class TwoLegRival(RivalPolicy):
    """Base of rivals that read prompts elsewhere; requests go to replicas that generate."""

    @abstractmethod
    def reader(
        self, router: SimulatedRouter, request: TraceRequest, replica: int, now_s: float
    ) -> int | None:
        """Return the replica that reads the prompt, None for the one that generates."""


class TwoLegPopRival(TwoLegRival, PopRival):
    """Base of such rivals that are made for one cluster."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Choose among the replicas that generate."""
        readers = {s.replica for s in router.world.sites if s.role is Role.PREFILL}
        return super().choose(router, request, refused | readers, now_s)


class StaticRoundRobinPolicy(TwoLegPopRival):
    """A fixed ratio of roles, and each role's replicas in turn."""

    def __init__(self) -> None:
        self._turns: Counter[tuple[int, ...]] = Counter()

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the next replica that generates."""
        return self._next(tuple(sorted(loads)))

    def reader(
        self, router: SimulatedRouter, request: TraceRequest, replica: int, now_s: float
    ) -> int | None:
        """Take the next prefill replica."""
        return self._next(tuple(readers_of(router, replica)))

    def _next(self, replicas: tuple[int, ...]) -> int | None:
        if not replicas:
            return None
        self._turns[replicas] += 1
        return replicas[(self._turns[replicas] - 1) % len(replicas)]


class LlmdRolesPolicy(TwoLegPopRival):
    """llm-d with its threshold of uncached tokens."""

    def __init__(self, pop: int, replicas: list[RoleReplica], threshold: int) -> None:
        self._replicas = replicas
        self._threshold = threshold
        self._scores = LlmdPolicy(pop, list(replicas))

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the highest score of the decode profile."""
        return self._scores.choose_among(loads, router, request, now_s)

    def reader(
        self, router: SimulatedRouter, request: TraceRequest, replica: int, now_s: float
    ) -> int | None:
        """Take the highest score of the prefill profile, if enough is not cached."""
        uncached = request.prompt_tokens - self._replicas[replica].cached(request)
        readers = readers_of(router, replica)
        if not readers or (self._threshold and uncached < self._threshold):
            return None
        at_s = router.reported_at_s(now_s)
        loads = {reader: router.replicas[reader].engine_load_at(at_s) for reader in readers}
        return self._scores.choose_among(loads, router, request, now_s)


class OracleWeights(NamedTuple):
    """The charges of an oracle.

    They are a prompt's own reading time once more, for those behind it; the delay of a sequence
    that decodes; and a sequence's share of a step, for those that decode.
    """

    congestion: float
    delay: float
    crowd: float


class LegChosen(NamedTuple):
    """An oracle's choice: the replica that generates, and the one that reads."""

    cost_s: float
    replica: int
    reader: int | None


class RolesOracle(TwoLegRival):
    """One policy for all cities that sees every queue, cache and link as it is now.

    It also sees the requests on their way. Of all pairs of replicas it takes the one that costs
    least: round trip, wait and reading, and what the request costs others, with `weights`.
    """

    retry_interval_s = 0.02

    def __init__(self, replicas: list[RoleReplica], weights: OracleWeights) -> None:
        self._replicas = replicas
        self._weights = weights
        self._chosen: dict[int, LegChosen] = {}
        self._coming: dict[int, dict[int, float]] = {}
        """For each replica, the work of the requests on their way there, by number."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the pair of replicas of lowest cost."""
        best: LegChosen | None = None
        needed = request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
        for site in router.world.sites:
            replica = self._replicas[site.replica]
            tokens = replica.prefill_tokens + replica.decode_tokens
            is_full = tokens and tokens + needed > site.profile.kv_tokens_max
            if site.role is Role.PREFILL or site.replica in refused or is_full:
                continue
            found = self._best_reader(router, request, site.replica, now_s)
            best = found if best is None or found < best else best
        if best is None:
            return None
        self._chosen[request.number] = best
        return best.replica

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Note a request on its way."""
        chosen = self._chosen[request.number]
        reader = replica if chosen.reader is None else chosen.reader
        work = self._replicas[reader].work(request, self._replicas[reader].cached(request))
        self._coming.setdefault(reader, {})[request.number] = work

    def reader(
        self, router: SimulatedRouter, request: TraceRequest, replica: int, now_s: float
    ) -> int | None:
        """Return the reader that was chosen with the replica."""
        chosen = self._chosen.pop(request.number)
        reader = replica if chosen.reader is None else chosen.reader
        self._coming[reader].pop(request.number, None)
        return chosen.reader

    def _best_reader(
        self, router: SimulatedRouter, request: TraceRequest, number: int, now_s: float
    ) -> LegChosen:
        replica, weights = self._replicas[number], self._weights
        rtt_s = router.rtt_ms[number] / 1000
        crowd_s = weights.crowd * replica.decode_share_s() * request.output_tokens
        reads_here_s = replica.work(request, replica.cached(request)) / replica.site.true_rate
        base_s = rtt_s + crowd_s
        here_s = base_s + self._wait_s(number, rtt_s / 2, now_s)
        here_s += (1 + weights.congestion + weights.delay * replica.decoding) * reads_here_s
        best = LegChosen(here_s, number, None)
        for reader in readers_of(router, number):
            other = self._replicas[reader]
            reads_s = other.work(request, other.cached(request)) / other.site.true_rate
            cost_s = base_s + self._wait_s(reader, rtt_s / 2, now_s)
            cost_s += (1 + weights.congestion) * reads_s
            if cost_s < best.cost_s:
                best = LegChosen(cost_s, number, reader)
        return best

    def _wait_s(self, number: int, one_way_s: float, now_s: float) -> float:
        replica = self._replicas[number]
        waiting = sum(self._coming.get(number, {}).values()) + replica.work_left(now_s)
        waiting += sum(
            replica.work(job.request, replica.cached(job.request)) for job in replica.queue
        )
        return max(0.0, waiting / replica.read_speed() - one_way_s)
