"""One run: requests arrive at their cities' routers, go to replicas and come back. Deterministic.

The order of a router is that of `router/serve.py`: choose, send; refused by the door, choose again
without it; nobody left, wait a moment for room, at most QUEUE_S, then answer 429.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple

from isochrone.wire.headers import PeerReplica
from nodeagent.decide.handoff import Handoff, choose_handoff, is_worth_probing
from ops.sim.oracle import Oracle
from ops.sim.ours import Ours, table_of
from ops.sim.policies import (
    CacheAware,
    ConsistentHash,
    LeastRequests,
    LeastTokens,
    LeastTokensNear,
    NearestOnly,
    Policy,
    Random,
    RoundRobin,
    SkyLb,
)
from ops.sim.replica import Job, Replica
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, Router
from ops.sim.traces import Request
from ops.sim.world import World

PASSING_S: Final = 0.002
"""To ask siblings, and go on to one: two round trips of a LAN, and what two doors take."""

RELAYING_S: Final = 0.0005
SHARE_INTERVAL_S: Final = 1.0
QUEUE_S: Final = 10.0
QUEUE_DEPTH_MAX: Final = 256
LOOK_AGAIN_S: Final = 0.1
NAMES: Final = (
    "ours",
    "random",
    "round robin",
    "nearest only",
    "least requests",
    "least tokens",
    "least tokens, near",
    "consistent hash",
    "cache aware",
    "SkyLB",
)


class Served(NamedTuple):
    """One request as it went. `ttft_s` is infinite where it was refused."""

    number: int
    replica: int
    ttft_s: float
    itl_s: float
    prompt_tokens: int
    cached_tokens: int
    is_away: bool


class Outcome(NamedTuple):
    """All requests of a run, how busy each replica was, and our own prediction errors."""

    served: Sequence[Served]
    busy: Sequence[float]
    errors_ms: Sequence[float]
    sends: Sequence[tuple[float, int, int]]
    """(when, from which PoP, to which replica)."""


class Simulation:
    """The clock, what is due, and everybody in it."""

    def __init__(
        self,
        world: World,
        requests: Sequence[Request],
        speed: float,
        age_s: float,
        policy: str,
        processes: int = 1,
    ) -> None:
        self.now_s = 0.0
        self._processes = processes
        self._shared_at_s = 0.0
        self._world = world
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._events = 0
        self._replicas = [Replica(site) for site in world.sites]
        self._settles = [0] * len(self._replicas)
        self._routers = [
            Router(pop, world, self._replicas, age_s) for pop in range(len(world.pops))
        ]
        self._policies = self._make(policy)
        self._waiting = [0] * len(world.pops)
        self._served: list[Served] = []
        self._sends: list[tuple[float, int, int]] = []
        self._passed: dict[int, int] = {}
        """Who was asked first, where a sibling took the request."""
        self._sent_at: dict[int, tuple[Request, int, float]] = {}
        shares = list(accumulate(world.demand))
        for request in requests:
            pop = min(len(shares) - 1, bisect_right(shares, request.place))
            self._at(request.at_s / speed, self._arrive, request, pop)

    def run(self) -> Outcome:
        """Let everything happen."""
        while self._due:
            self.now_s, _, call, of = heappop(self._due)
            if self._processes > 1 and self.now_s - self._shared_at_s >= SHARE_INTERVAL_S:
                self._shared_at_s = self.now_s
                self._share()
            call(*of)
        errors = [
            error
            for policy in self._policies
            if isinstance(policy, Ours)
            for error in policy.errors_ms
        ]
        busy = [replica.busy_s / max(1e-9, self.now_s) for replica in self._replicas]
        return Outcome(self._served, busy, errors, self._sends)

    def _make(self, name: str) -> list[Policy]:
        pops = range(len(self._world.pops))
        if name.startswith("oracle"):
            oracle = Oracle(self._replicas, float(name.partition(" ")[2] or 0))
            return [oracle for _ in pops]
        if name == "ours":
            table = table_of(self._world)
            return [Ours(self._routers[pop], table, lambda: self.now_s) for pop in pops]
        makers: dict[str, Callable[[int], Policy]] = {
            "random": Random,
            "round robin": RoundRobin,
            "nearest only": NearestOnly,
            "least requests": lambda _: LeastRequests(),
            "least tokens": lambda _: LeastTokens(),
            "least tokens, near": lambda _: LeastTokensNear(),
            "consistent hash": lambda _: ConsistentHash(len(self._replicas)),
            "cache aware": lambda _: CacheAware(),
            "SkyLB": lambda _: SkyLb(),
        }
        return [makers[name](pop) for pop in pops]

    def _share(self) -> None:
        """Let the processes of each router tell one another, as the main process does for them."""
        for first in range(0, len(self._policies), self._processes):
            several = self._policies[first : first + self._processes]
            ours = [policy.fleet for policy in several if isinstance(policy, Ours)]
            for fleet in ours:
                fleet.outbox.is_open = True
                rows = fleet.outbox.take()
                for other in ours:
                    if rows and other is not fleet:
                        other.learned_prompts(rows)

    def _at(self, at_s: float, call: Callable[..., None], *of: Any) -> None:
        self._events += 1
        heappush(self._due, (at_s, self._events, call, of))

    def _arrive(self, request: Request, pop: int) -> None:
        self._send(request, pop, self.now_s, frozenset())

    def _send(self, request: Request, pop: int, began_s: float, refused: frozenset[int]) -> None:
        """Choose and send, or wait for room, or give up."""
        router, policy = self._routers[pop], self._policies[pop]
        replica = policy.choose(router, request, refused, self.now_s)
        if replica is None:
            is_over = self.now_s - began_s >= QUEUE_S
            if is_over or self._waiting[pop] >= QUEUE_DEPTH_MAX:
                self._served.append(
                    Served(request.number, -1, inf, 0.0, request.prompt_tokens, 0, False)
                )
                return
            self._waiting[pop] += 1
            self._at(self.now_s + LOOK_AGAIN_S, self._look_again, request, pop, began_s)
            return
        policy.sent(request, replica, self.now_s)
        router.count(replica, 1, request.prompt_tokens, OUTPUT_TOKENS_ASSUMED, self.now_s)
        self._sends.append((self.now_s, pop, replica))
        arrives_s = self.now_s + router.rtt_ms[replica] / 2000
        self._at(arrives_s, self._reach, request, pop, replica, began_s, refused)

    def _look_again(self, request: Request, pop: int, began_s: float) -> None:
        self._waiting[pop] -= 1
        self._send(request, pop, began_s, frozenset())

    def _reach(
        self, request: Request, pop: int, replica: int, began_s: float, refused: frozenset[int]
    ) -> None:
        """Come to the replica's door."""
        policy = self._policies[pop]
        told = policy.told(request) if isinstance(policy, Ours) else (request.prompt_tokens, 0.0)
        job = Job(request, request.prompt_tokens + OUTPUT_TOKENS_ASSUMED, told[0], pop, told[1])
        if isinstance(policy, Oracle):
            policy.reached(request, replica)
        most = 0
        if isinstance(policy, Ours):
            most = policy.queue_tokens_max(request)
            verdict = self._judge(policy.siblings(request), most)
            if verdict is not None:
                there_s = self.now_s + PASSING_S
                self._at(there_s, self._pass_on, job, verdict, pop, replica, began_s, refused, most)
                return
        self._take(job, pop, replica, began_s, refused, most)

    def _judge(self, siblings: Sequence[PeerReplica], most: int) -> Handoff | None:
        """Say, as a node's door does, which sibling a request had better go on to."""
        unread = {one.replica_id: self._replicas[_number(one)].left(self.now_s) for one in siblings}
        if not siblings or not is_worth_probing(siblings[0], unread[siblings[0].replica_id]):
            return None
        return choose_handoff(siblings, unread, most or None)

    def _pass_on(
        self,
        job: Job,
        verdict: Handoff,
        pop: int,
        replica: int,
        began_s: float,
        refused: frozenset[int],
        most: int,
    ) -> None:
        """Come to a sibling's door; where it is busier by now, the first takes it after all."""
        sibling, request = verdict.target, job.request
        told = (sibling.pending_prefill_tokens, pop, sibling.prefill_ms)
        other = Job(request, job.wanted_tokens, *told)
        number = _number(sibling)
        if self._replicas[number].take(other, self.now_s, verdict.queue_tokens_max):
            self._sent_at[request.number] = (request, pop, began_s)
            self._passed[request.number] = replica
            self._plan(number)
        else:
            self._take(job, pop, replica, began_s, refused, most)

    def _take(
        self,
        job: Job,
        pop: int,
        replica: int,
        began_s: float,
        refused: frozenset[int],
        most: int,
    ) -> None:
        """Let the replica asked take a request, or turn it away."""
        request = job.request
        if self._replicas[replica].take(job, self.now_s, most):
            self._sent_at[request.number] = (request, pop, began_s)
            self._plan(replica)
        else:
            at_s = self.now_s
            back_s = at_s + self._routers[pop].rtt_ms[replica] / 2000
            self._at(back_s, self._refused, request, pop, replica, began_s, refused, at_s)

    def _refused(
        self,
        request: Request,
        pop: int,
        replica: int,
        began_s: float,
        refused: frozenset[int],
        at_s: float,
    ) -> None:
        router, policy = self._routers[pop], self._policies[pop]
        load = router.answered(replica, at_s)
        if isinstance(policy, Ours):
            policy.refused(request, at_s)
            policy.heard(replica, load, at_s)
        router.count(replica, -1, -request.prompt_tokens, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        self._send(request, pop, began_s, refused | {replica})

    def _plan(self, replica: int) -> None:
        self._settles[replica] += 1
        at_s = self._replicas[replica].next_at()
        if at_s < inf:
            self._at(max(at_s, self.now_s), self._settle, replica, self._settles[replica])

    def _settle(self, replica: int, planned: int) -> None:
        """Let a replica come to its next event, unless something has changed since."""
        if planned != self._settles[replica]:
            return
        first, ended = self._replicas[replica].settle(self.now_s)
        for job in first:
            pop = self._sent_at[job.request.number][1]
            if job.request.number in self._passed:
                job.first_at_s += RELAYING_S
            back_s = self._routers[pop].rtt_ms[replica] / 2000 + job.first_at_s
            self._at(back_s, self._first_token, job.request, pop, replica)
        for job in ended:
            pop = self._sent_at[job.request.number][1]
            ended_s = max(self.now_s, job.first_at_s)
            back_s = ended_s + self._routers[pop].rtt_ms[replica] / 2000
            self._at(back_s, self._end, job, pop, replica, ended_s)
        self._plan(replica)

    def _first_token(self, request: Request, pop: int, replica: int) -> None:
        router, policy = self._routers[pop], self._policies[pop]
        asked = self._passed.pop(request.number, replica)
        if isinstance(policy, Ours) and asked != replica:
            policy.passed_on(request, replica)
            router.count(asked, -1, -request.prompt_tokens, -OUTPUT_TOKENS_ASSUMED, self.now_s)
            router.count(replica, 1, request.prompt_tokens, OUTPUT_TOKENS_ASSUMED, self.now_s)
        router.count(replica, 0, -request.prompt_tokens, 0, self.now_s)
        read_at_s = self.now_s - router.rtt_ms[replica] / 2000
        load = router.answered(replica, read_at_s)
        if isinstance(policy, Ours):
            policy.first_token(request, self.now_s)
            policy.heard(replica, load, read_at_s)

    def _end(self, job: Job, pop: int, replica: int, ended_s: float) -> None:
        request, router = job.request, self._routers[pop]
        router.count(replica, -1, 0, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        policy = self._policies[pop]
        if isinstance(policy, Ours):
            policy.ended(request, job.cached_tokens, self.now_s)
        _, _, began_s = self._sent_at.pop(request.number)
        steps = max(1, request.output_tokens - 1)
        self._served.append(
            Served(
                request.number,
                replica,
                job.first_at_s + router.rtt_ms[replica] / 2000 - began_s,
                (ended_s - job.first_at_s) / steps,
                request.prompt_tokens,
                job.cached_tokens,
                self._world.sites[replica].pop != self._home_of(router),
            )
        )

    def _home_of(self, router: Router) -> int:
        return self._world.sites[router.by_distance[0]].pop


def _number(sibling: PeerReplica) -> int:
    return int(sibling.replica_id[1:])


def simulate(
    world: World,
    requests: Sequence[Request],
    speed: float,
    age_s: float,
    policy: str,
    processes: int = 1,
) -> Outcome:
    """Run once; the same arguments give the same outcome.

    With `processes`, so many PoPs after another are processes of one router, that tell one another
    what was answered where.
    """
    return Simulation(world, requests, speed, age_s, policy, processes).run()
