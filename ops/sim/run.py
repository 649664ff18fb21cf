"""One deterministic run: requests arrive at their cities' routers, go to replicas and come back.

A router works as in `router/pipeline.py`: rank and send; if the node refuses, rank again without
that replica; if no replica has capacity, look again every RETRY_INTERVAL_S for at most
QUEUE_TIMEOUT_S, then answer 429.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple

from isochrone.ttft_order import ttft_objective
from isochrone.wire.http.headers import PeerReplica
from nodeagent.decide.requests.handoff import Handoff, choose_handoff, is_worth_probing
from ops.sim.isochrone_policy import IsochronePolicy
from ops.sim.losses import UNLISTED_AFTER_S, ReplicaLoss
from ops.sim.oracle import OraclePolicy
from ops.sim.outcome import RunOutcome, SendEvent, ServedRequest
from ops.sim.policies import RoutingPolicy
from ops.sim.policy_choice import create_policies
from ops.sim.replica import QueueOrder, ReplicaKind, SimulatedReplica, StepEvents
from ops.sim.replica_job import ReplicaJob
from ops.sim.rivals import RivalPolicy
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld

HANDOFF_S: Final = 0.002
"""Time to ask peer replicas and hand a request off: two round trips of a LAN and two admissions."""

RELAY_S: Final = 0.0005
"""Time that the first token of a handed-off request takes through the first node."""

SHARE_INTERVAL_S: Final = 1.0
QUEUE_TIMEOUT_S: Final = 10.0
QUEUE_DEPTH_MAX: Final = 256
RETRY_INTERVAL_S: Final = 0.1


class RoutedRequest(NamedTuple):
    """A request at a PoP's router, and the replicas that have refused it."""

    request: TraceRequest
    pop: int
    began_s: float
    refused: frozenset[int] = frozenset()


class BegunAnswer(NamedTuple):
    """An answer as it began, also if another replica goes on with it."""

    request: TraceRequest
    ttft_s: float
    first_token_at_s: float
    cached_tokens: int


class SentAttempt(NamedTuple):
    """A request on its way to a replica; `queue_tokens_max` limits the queue there, 0 for none."""

    routed: RoutedRequest
    job: ReplicaJob
    replica: int
    queue_tokens_max: int


class Simulation:
    """The simulated clock, the events to come, and all routers and replicas."""

    def __init__(
        self,
        world: RoutingWorld,
        requests: Sequence[TraceRequest],
        speed: float,
        age_s: float,
        policy: str,
        processes: int = 1,
        losses: Sequence[ReplicaLoss] = (),
        queue_order: QueueOrder | None = None,
        replica_kind: ReplicaKind = SimulatedReplica,
    ) -> None:
        self.now_s = 0.0
        self._processes = processes
        self._shared_at_s = 0.0
        self._world = world
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """Heap of (time, number, function, arguments)."""
        self._event_count = 0
        self._replicas = self._create_replicas(replica_kind, queue_order)
        self._settle_numbers = [0] * len(self._replicas)
        """For each replica, the number of its last planned `settle`: earlier ones are obsolete."""
        self._routers = [
            SimulatedRouter(pop, world, self._replicas, age_s) for pop in range(len(world.pops))
        ]
        self._policies = self._create_policies(policy, requests)
        self.policies: Sequence[RoutingPolicy] = self._policies
        self._waiting = [0] * len(world.pops)
        self._served: list[ServedRequest] = []
        self._sends: list[SendEvent] = []
        self._handed_off: set[int] = set()
        """Requests that a peer of the addressed replica serves, until their first token."""
        self._in_flight: dict[int, RoutedRequest] = {}
        self._began: dict[int, BegunAnswer] = {}
        """Answers that had begun when their replica died."""
        self._dead: set[int] = set()
        for loss in losses:
            self._schedule(loss.at_s, self._lose_replica, loss)
        shares = list(accumulate(world.demand))
        for request in requests:
            pop = min(len(shares) - 1, bisect_right(shares, request.place))
            self._schedule(request.at_s / speed, self._arrive, request, pop)

    def _create_replicas(
        self, kind: ReplicaKind, queue_order: QueueOrder | None
    ) -> list[SimulatedReplica]:
        return [kind(site, queue_order) for site in self._world.sites]

    def _create_policies(
        self, name: str, requests: Sequence[TraceRequest]
    ) -> Sequence[RoutingPolicy]:
        return create_policies(name, self._routers, self._replicas, requests, lambda: self.now_s)

    def run(self) -> RunOutcome:
        """Process all events."""
        while self._events:
            self.now_s, _, function, arguments = heappop(self._events)
            if self._processes > 1 and self.now_s - self._shared_at_s >= SHARE_INTERVAL_S:
                self._shared_at_s = self.now_s
                self._share_prompts()
            function(*arguments)
        errors = [
            error
            for policy in self._policies
            if isinstance(policy, IsochronePolicy)
            for error in policy.errors_ms
        ]
        busy = [replica.busy_s / max(1e-9, self.now_s) for replica in self._replicas]
        return RunOutcome(self._served, busy, errors, self._sends)

    def _share_prompts(self) -> None:
        """Share prompts between the processes of each router, as the main process does."""
        for first in range(0, len(self._policies), self._processes):
            policies = self._policies[first : first + self._processes]
            fleets = [policy.fleet for policy in policies if isinstance(policy, IsochronePolicy)]
            for fleet in fleets:
                fleet.prompt_outbox.is_open = True
                rows = fleet.prompt_outbox.take()
                for other in fleets:
                    if rows and other is not fleet:
                        other.learn_prompts(rows)

    def _schedule(self, at_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self._event_count += 1
        heappush(self._events, (at_s, self._event_count, function, arguments))

    def _arrive(self, request: TraceRequest, pop: int) -> None:
        self._send(RoutedRequest(request, pop, self.now_s))

    def _send(self, routed: RoutedRequest) -> None:
        """Choose a replica and send the request, or wait for capacity, or refuse it."""
        request, pop = routed.request, routed.pop
        router, policy = self._routers[pop], self._policies[pop]
        dead = self._dead if isinstance(policy, OraclePolicy) else router.known_dead
        refused = routed.refused | dead if dead else routed.refused
        replica = policy.choose(router, request, refused, self.now_s)
        if replica is None:
            timeout_s, retry_s = QUEUE_TIMEOUT_S, RETRY_INTERVAL_S
            if isinstance(policy, RivalPolicy):
                timeout_s, retry_s = policy.queue_timeout_s, policy.retry_interval_s
            is_over = self.now_s - routed.began_s >= timeout_s
            if is_over or (self._waiting[pop] >= QUEUE_DEPTH_MAX and timeout_s < inf):
                self._served.append(
                    ServedRequest(request.number, -1, inf, 0.0, request.prompt_tokens, 0, False)
                )
                return
            self._waiting[pop] += 1
            self._schedule(self.now_s + retry_s, self._look_again, routed)
            return
        policy.record_sent(request, replica, self.now_s)
        router.count(replica, 1, request.prompt_tokens, OUTPUT_TOKENS_ASSUMED, self.now_s)
        self._sends.append(SendEvent(self.now_s, pop, replica))
        arrives_s = self.now_s + router.rtt_ms[replica] / 2000
        self._schedule(arrives_s, self._reach_node, routed, replica)

    def _look_again(self, routed: RoutedRequest) -> None:
        self._waiting[routed.pop] -= 1
        self._send(routed._replace(refused=frozenset()))

    def _reach_node(self, routed: RoutedRequest, replica: int) -> None:
        """Arrive at the replica's node, which may hand the request off to a peer."""
        policy, request = self._policies[routed.pop], routed.request
        if isinstance(policy, OraclePolicy):
            policy.record_arrival(request, replica)
        if replica in self._dead:
            self._fail(routed, replica)
            return
        if not isinstance(policy, IsochronePolicy):
            job = self._job_of(routed, request.prompt_tokens, 0.0)
            self._admit(SentAttempt(routed, job, replica, 0))
            return
        forecast = policy.prefill_forecast(request)
        job = self._job_of(routed, forecast.pending_prefill_tokens, forecast.prefill_ms)
        attempt = SentAttempt(routed, job, replica, policy.queue_tokens_max(request))
        verdict = self._judge_handoff(policy.handoff_peers(request), attempt.queue_tokens_max)
        if verdict is None:
            self._admit(attempt)
        else:
            self._announce(attempt, _replica_number(verdict.target))
            self._schedule(self.now_s + HANDOFF_S, self._hand_off, attempt, verdict)

    def _job_of(
        self, routed: RoutedRequest, pending_prefill_tokens: int, prefill_ms: float
    ) -> ReplicaJob:
        """Return what a request is to the replica that it reaches now."""
        request, left_ms = routed.request, None
        if request.ttft_s:
            left_ms = max(0, int(1000 * (routed.began_s + request.ttft_s - self.now_s)))
        return ReplicaJob(
            request,
            request.prompt_tokens + OUTPUT_TOKENS_ASSUMED,
            pending_prefill_tokens,
            routed.pop,
            prefill_ms,
            ttft_objective(self.now_s, left_ms, int(prefill_ms)),
        )

    def _judge_handoff(self, peers: Sequence[PeerReplica], queue_tokens_max: int) -> Handoff | None:
        """Return the peer that a node would hand the request off to, None to keep it."""
        queued = {
            peer.replica_id: self._replicas[_replica_number(peer)].queued_tokens(self.now_s)
            for peer in peers
            if _replica_number(peer) not in self._dead
        }
        if not peers or not is_worth_probing(peers[0], queued[peers[0].replica_id]):
            return None
        return choose_handoff(peers, queued, queue_tokens_max or None)

    def _hand_off(self, attempt: SentAttempt, verdict: Handoff) -> None:
        """Arrive at the peer; if it has become busier, the first replica takes the request."""
        peer, routed = verdict.target, attempt.routed
        job = self._job_of(routed, peer.pending_prefill_tokens, peer.expected_prefill_ms)
        number = _replica_number(peer)
        is_dead = number in self._dead
        if not is_dead and self._replicas[number].admit(job, self.now_s, verdict.queue_tokens_max):
            self._in_flight[routed.request.number] = routed
            self._handed_off.add(routed.request.number)
            self._plan_settle(number)
        else:
            self._announce(attempt, attempt.replica)
            self._admit(attempt)

    def _announce(self, attempt: SentAttempt, replica: int) -> None:
        """Let the node tell the router at once which replica has the request."""
        pop = attempt.routed.pop
        told_s = self.now_s + self._routers[pop].rtt_ms[attempt.replica] / 2000
        self._schedule(told_s, self._receive_handoff, attempt.routed, replica)

    def _receive_handoff(self, routed: RoutedRequest, replica: int) -> None:
        request, router = routed.request, self._routers[routed.pop]
        policy = self._policies[routed.pop]
        assert isinstance(policy, IsochronePolicy)
        was_at = policy.record_handoff(request, replica)
        router.count(was_at, -1, -request.prompt_tokens, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        router.count(replica, 1, request.prompt_tokens, OUTPUT_TOKENS_ASSUMED, self.now_s)

    def _admit(self, attempt: SentAttempt) -> None:
        """Let the replica admit the request or refuse it."""
        routed, replica = attempt.routed, attempt.replica
        if replica in self._dead:
            self._fail(routed, replica)
        elif self._replicas[replica].admit(attempt.job, self.now_s, attempt.queue_tokens_max):
            self._in_flight[routed.request.number] = routed
            self._plan_settle(replica)
        else:
            back_s = self.now_s + self._routers[routed.pop].rtt_ms[replica] / 2000
            self._schedule(back_s, self._receive_refusal, routed, replica, self.now_s)

    def _receive_refusal(self, routed: RoutedRequest, replica: int, refused_at_s: float) -> None:
        request = routed.request
        router, policy = self._routers[routed.pop], self._policies[routed.pop]
        load = router.record_answer(replica, refused_at_s)
        if isinstance(policy, IsochronePolicy):
            policy.record_refusal(request, refused_at_s)
            policy.record_load(replica, load, refused_at_s, False)
        elif isinstance(policy, RivalPolicy):
            policy.record_end(request, replica)
        router.count(replica, -1, -request.prompt_tokens, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        self._send(routed._replace(refused=routed.refused | {replica}))

    def _plan_settle(self, replica: int) -> None:
        self._settle_numbers[replica] += 1
        at_s = self._replicas[replica].next_event_s()
        if at_s < inf:
            number = self._settle_numbers[replica]
            self._schedule(max(at_s, self.now_s), self._settle, replica, number)

    def _settle(self, replica: int, number: int) -> None:
        """Let a replica reach its next event, unless that was rescheduled since."""
        if number != self._settle_numbers[replica] or replica in self._dead:
            return
        events = self._settle_replica(replica)
        for job in events.first_tokens:
            pop = self._in_flight[job.request.number].pop
            if job.request.number in self._handed_off:
                self._handed_off.remove(job.request.number)
                job.first_token_at_s += RELAY_S
            back_s = self._routers[pop].rtt_ms[replica] / 2000 + job.first_token_at_s
            self._schedule(back_s, self._receive_first_token, job.request, pop, replica)
        for job in events.ended:
            pop = self._in_flight[job.request.number].pop
            ended_s = max(self.now_s, job.first_token_at_s)
            back_s = ended_s + self._routers[pop].rtt_ms[replica] / 2000
            self._schedule(back_s, self._receive_end, job, pop, replica, ended_s)
        self._plan_settle(replica)

    def _settle_replica(self, replica: int) -> StepEvents:
        return self._replicas[replica].settle(self.now_s)

    def _lose_replica(self, loss: ReplicaLoss) -> None:
        """Kill a replica: its connections are reset, and it comes back with an empty cache."""
        replica = loss.replica
        self._dead.add(replica)
        for job in self._replicas[replica].lose():
            routed = self._in_flight.pop(job.request.number)
            self._handed_off.discard(job.request.number)
            if job.first_token_at_s:
                routed = self._resume(routed, job, replica)
            self._fail(routed, replica, job.first_token_at_s)
        for router, policy in zip(self._routers, self._policies, strict=True):
            unlisted_s = min(loss.at_s + UNLISTED_AFTER_S, (loss.at_s + loss.back_s) / 2)
            self._schedule(unlisted_s, self._list, router, policy, replica, False)
            self._schedule(loss.back_s, self._list, router, policy, replica, True)
        self._schedule(loss.back_s, self._restart_replica, replica)

    def _restart_replica(self, replica: int) -> None:
        self._dead.remove(replica)
        self._replicas[replica].restart(self.now_s)

    def _resume(self, routed: RoutedRequest, job: ReplicaJob, replica: int) -> RoutedRequest:
        """Return the request that continues an answer: what was generated is part of the prompt."""
        request = job.request
        back_s = self._routers[routed.pop].rtt_ms[replica] / 2000
        ttft_s = job.first_token_at_s + back_s - routed.began_s
        began = BegunAnswer(request, ttft_s, job.first_token_at_s, job.cached_tokens)
        self._began.setdefault(request.number, began)
        generated = min(request.output_tokens - 1, self._replicas[replica].generated(job))
        return routed._replace(
            request=request._replace(
                prompt_tokens=request.prompt_tokens + generated,
                output_tokens=request.output_tokens - generated,
            )
        )

    def _list(
        self, router: SimulatedRouter, policy: RoutingPolicy, replica: int, is_listed: bool
    ) -> None:
        """Take a replica into a router's table, or out of it."""
        router.list_replica(replica, is_listed)
        if isinstance(policy, IsochronePolicy):
            policy.list_replica(replica, is_listed)

    def _fail(self, routed: RoutedRequest, replica: int, first_token_at_s: float = 0.0) -> None:
        """Reset the connection of a request to a dead replica."""
        back_s = self.now_s + self._routers[routed.pop].rtt_ms[replica] / 2000
        self._schedule(back_s, self._receive_failure, routed, replica, first_token_at_s)

    def _receive_failure(
        self, routed: RoutedRequest, replica: int, first_token_at_s: float
    ) -> None:
        """Note that a request's connection was reset, and send it elsewhere."""
        router, policy = self._routers[routed.pop], self._policies[routed.pop]
        if isinstance(policy, IsochronePolicy):
            policy.record_failure(routed.request)
        elif isinstance(policy, RivalPolicy):
            policy.record_end(routed.request, replica)
        prompt_tokens = 0 if first_token_at_s else -routed.request.prompt_tokens
        router.count(replica, -1, prompt_tokens, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        router.known_dead |= {replica}
        self._send(routed._replace(refused=routed.refused | {replica}))

    def _receive_first_token(self, request: TraceRequest, pop: int, replica: int) -> None:
        router, policy = self._routers[pop], self._policies[pop]
        router.count(replica, 0, -request.prompt_tokens, 0, self.now_s)
        written_at_s = self.now_s - router.rtt_ms[replica] / 2000
        load = router.record_answer(replica, written_at_s)
        if isinstance(policy, IsochronePolicy):
            policy.record_first_token(request, self.now_s)
            policy.record_load(replica, load, written_at_s, policy.is_handed_off(request))
        elif isinstance(policy, RivalPolicy):
            policy.record_first_token(request, replica)

    def _receive_end(self, job: ReplicaJob, pop: int, replica: int, ended_s: float) -> None:
        request, router = job.request, self._routers[pop]
        router.count(replica, -1, 0, -OUTPUT_TOKENS_ASSUMED, self.now_s)
        policy = self._policies[pop]
        if isinstance(policy, IsochronePolicy):
            policy.record_end(request, job.cached_tokens, self.now_s)
        elif isinstance(policy, RivalPolicy):
            policy.record_end(request, replica)
        began_s = self._in_flight.pop(request.number).began_s
        back_s = router.rtt_ms[replica] / 2000
        answer = self._began.pop(request.number, None) or BegunAnswer(
            request,
            job.first_token_at_s + back_s - began_s,
            job.first_token_at_s,
            job.cached_tokens,
        )
        steps = max(1, answer.request.output_tokens - 1)
        nearest_pop = self._world.sites[router.by_distance[0]].pop
        self._served.append(
            ServedRequest(
                request.number,
                replica,
                answer.ttft_s,
                (ended_s - answer.first_token_at_s) / steps,
                answer.request.prompt_tokens,
                answer.cached_tokens,
                self._world.sites[replica].pop != nearest_pop,
            )
        )


def _replica_number(peer: PeerReplica) -> int:
    return int(peer.replica_id[1:])


def simulate(
    world: RoutingWorld,
    requests: Sequence[TraceRequest],
    speed: float,
    age_s: float,
    policy: str,
    processes: int = 1,
    losses: Sequence[ReplicaLoss] = (),
    queue_order: QueueOrder | None = None,
    replica_kind: ReplicaKind = SimulatedReplica,
) -> RunOutcome:
    """Run once; the same arguments give the same outcome.

    `speed` divides the arrival times of the trace. With `processes`, each so many consecutive PoPs
    are processes of one router, which share what was answered where. `losses` are the replicas that
    die during the run. `queue_order` is that of the replicas' queues, if not ours; `replica_kind`
    the model of a replica (`stepped_replica.py`).
    """
    return Simulation(
        world, requests, speed, age_s, policy, processes, losses, queue_order, replica_kind
    ).run()
