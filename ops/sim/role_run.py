"""A run with roles: another replica may read a prompt, and its KV moves to the one that decodes.

The node of the decode replica decides with the agent's code
(nodeagent/decide/requests/prefill_leg.py), the router names candidates with its own
(router/decide/choice/prefill_replicas.py).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from isochrone.wire.http.headers import PeerReplica
from nodeagent.decide.requests.prefill_leg import (
    DecodeLoad,
    LegChoice,
    WaitingPromptSize,
    is_too_short,
    plan_prefill,
)
from ops.sim.isochrone_policy import route_table
from ops.sim.outcome import RunOutcome
from ops.sim.policies import RoutingPolicy
from ops.sim.replica import QueueOrder, ReplicaKind, SimulatedReplica, StepEvents
from ops.sim.replica_job import ReplicaJob
from ops.sim.role_policies import (
    LLMD_THRESHOLD,
    LlmdRolesPolicy,
    OracleWeights,
    RolesOracle,
    RolesPolicy,
    StaticRoundRobinPolicy,
    TwoLegRival,
)
from ops.sim.role_replica import GAPS_PER_S, RoleReplica
from ops.sim.run import SentAttempt, Simulation
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld

KV_BYTES_PER_TOKEN: Final = 80 * 8 * 128 * 2
"""Llama 3.3 70B with its KV in FP8: layers, KV heads, head dimension, keys and values."""

LINK_BYTES_PER_S: Final = 25e9
"""200 Gbit/s in each direction for a replica of two H100; DGX H100 has 400 Gbit/s for each GPU."""

LEG_S: Final = 0.002
"""Time to ask prefill replicas and open a leg: two round trips of a LAN and the engine's answer."""


class LegJob(ReplicaJob):
    """A prompt that is read for another replica."""

    __slots__ = ()


class LegUnderWay(NamedTuple):
    """A prompt that one replica reads for another, and the tokens that are cached there."""

    attempt: SentAttempt
    reader: int
    cached_tokens: int


class RoleOutcome(NamedTuple):
    """A run, the tokens by the gap before them, and how many requests chose what."""

    outcome: RunOutcome
    gaps: Counter[int]
    choices: Counter[str]

    def gap_ms(self, share: float) -> float:
        """Return the time between tokens that `share` of them do not exceed."""
        left = share * self.gaps.total()
        for gap, count in sorted(self.gaps.items()):
            left -= count
            if left <= 0:
                return 1000 * gap / GAPS_PER_S
        return 0.0


class RoleSimulation(Simulation):
    """Replicas with roles."""

    def __init__(
        self,
        world: RoutingWorld,
        requests: Sequence[TraceRequest],
        speed: float,
        age_s: float,
        policy: str,
    ) -> None:
        self.choices: Counter[str] = Counter()
        self._legs: dict[ReplicaJob, LegUnderWay] = {}
        super().__init__(world, requests, speed, age_s, policy)

    def run_roles(self) -> RoleOutcome:
        """Process all events."""
        outcome = self.run()
        gaps: Counter[int] = Counter()
        for replica in self._replicas:
            gaps += self._role_replica(replica).gaps
        return RoleOutcome(outcome, gaps, self.choices)

    def _create_replicas(
        self, kind: ReplicaKind, queue_order: QueueOrder | None
    ) -> list[SimulatedReplica]:
        return [RoleReplica(site, LINK_BYTES_PER_S) for site in self._world.sites]

    def _create_policies(
        self, name: str, requests: Sequence[TraceRequest]
    ) -> Sequence[RoutingPolicy]:
        replicas = [self._role_replica(replica) for replica in self._replicas]
        if name.startswith("oracle"):
            congestion, delay, crowd = map(float, name.split()[1:])
            oracle = RolesOracle(replicas, OracleWeights(congestion, delay, crowd))
            return [oracle for _ in self._routers]
        if name == "round robin":
            return [StaticRoundRobinPolicy() for _ in self._routers]
        if name.startswith("llm-d"):
            threshold = int(name.split()[1]) if " " in name else LLMD_THRESHOLD
            return [LlmdRolesPolicy(r.pop, replicas, threshold) for r in self._routers]
        table = route_table(self._world)
        return [RolesPolicy(router, table, lambda: self.now_s) for router in self._routers]

    @staticmethod
    def _role_replica(replica: SimulatedReplica) -> RoleReplica:
        return cast(RoleReplica, replica)

    def _admit(self, attempt: SentAttempt) -> None:
        """Decide where the prompt is read, then let the replica admit the request or refuse it."""
        readers = self._readers(attempt)
        if not readers:
            super()._admit(attempt)
            return
        replica = self._role_replica(self._replicas[attempt.replica])
        if not replica.admit_elsewhere(attempt.job, self.now_s, attempt.queue_tokens_max):
            super()._admit(attempt)
            return
        self._in_flight[attempt.routed.request.number] = attempt.routed
        self._plan_settle(attempt.replica)
        self._schedule(self.now_s + LEG_S, self._begin_leg, attempt, readers)

    def _readers(self, attempt: SentAttempt) -> Sequence[PeerReplica | int]:
        """Return the replicas that may read the prompt, in order; none if it is read here."""
        routed, number = attempt.routed, attempt.replica
        policy, request = self._policies[routed.pop], routed.request
        if isinstance(policy, TwoLegRival):
            reader = policy.reader(self._routers[routed.pop], request, number, self.now_s)
            return () if reader is None else (reader,)
        assert isinstance(policy, RolesPolicy)
        replica = self._role_replica(self._replicas[number])
        candidates = policy.prefill_candidates(request, self.now_s)
        expected = replica.expected_decoding.record(replica.decoding)
        if len(candidates) < 2:
            return ()
        if is_too_short(candidates[0]):
            self.choices[LegChoice.SHORT] += 1
            return ()
        queues = {
            peer.replica_id: self._replicas[int(peer.replica_id[1:])].queued_tokens(self.now_s)
            for peer in candidates[1:]
        }
        cached = replica.cached(request)
        plan = plan_prefill(
            candidates,
            queues,
            WaitingPromptSize(cached, request.prompt_tokens - cached),
            DecodeLoad(replica.queued_tokens(self.now_s), expected),
            replica.transfer_rate,
            self.now_s,
        )
        self.choices[plan.choice] += 1
        return plan.candidates

    def _begin_leg(self, attempt: SentAttempt, readers: Sequence[PeerReplica | int]) -> None:
        """Have the first reader that admits the prompt read it; if none does, it is read here."""
        routed, request = attempt.routed, attempt.routed.request
        cached = self._replicas[attempt.replica].cached(request)
        for reader in readers:
            pending, prefill_ms, number = request.prompt_tokens, 0.0, reader
            if isinstance(reader, PeerReplica):
                number = int(reader.replica_id[1:])
                pending, prefill_ms = reader.pending_prefill_tokens, reader.prefill_ms
            assert isinstance(number, int)
            leg = request._replace(output_tokens=1)
            job = LegJob(leg, request.prompt_tokens, pending, routed.pop, prefill_ms)
            if self._replicas[number].admit(job, self.now_s):
                self._legs[job] = LegUnderWay(attempt, number, cached)
                self._plan_settle(number)
                self._announce_prefill(attempt, number)
                return
        self._role_replica(self._replicas[attempt.replica]).read_here(attempt.job, self.now_s)
        self._plan_settle(attempt.replica)

    def _announce_prefill(self, attempt: SentAttempt, reader: int) -> None:
        pop = attempt.routed.pop
        policy = self._policies[pop]
        if isinstance(policy, RolesPolicy):
            told_s = self.now_s + self._routers[pop].rtt_ms[attempt.replica] / 2000
            self._schedule(told_s, policy.record_prefill, attempt.routed.request, reader)

    def _settle_replica(self, replica: int) -> StepEvents:
        events = super()._settle_replica(replica)
        for job in events.ended:
            leg = self._legs.pop(job, None)
            if leg is not None:
                self._send_kv(job, leg)
        return StepEvents(
            [job for job in events.first_tokens if not isinstance(job, LegJob)],
            [job for job in events.ended if not isinstance(job, LegJob)],
        )

    def _send_kv(self, job: ReplicaJob, leg: LegUnderWay) -> None:
        """Let the KV of a prompt that was read arrive at the replica that decodes."""
        reader = self._role_replica(self._replicas[leg.reader])
        target = self._role_replica(self._replicas[leg.attempt.replica])
        tokens = max(1, job.request.prompt_tokens - leg.cached_tokens)
        read = job.request.prompt_tokens - job.cached_tokens
        last = min(tokens, read, reader.site.profile.chunk_tokens) * KV_BYTES_PER_TOKEN
        size = tokens * KV_BYTES_PER_TOKEN
        sent_s = reader.sending.end_s(job.began_s, self.now_s, size, last)
        arrives_s = max(sent_s, target.receiving.end_s(job.began_s, self.now_s, size, last))
        target.transfer_rate.record(tokens, arrives_s - self.now_s, arrives_s)
        cached = max(job.cached_tokens, leg.cached_tokens)
        self._schedule(arrives_s, self._receive_kv, leg.attempt, cached)

    def _receive_kv(self, attempt: SentAttempt, cached_tokens: int) -> None:
        replica = attempt.replica
        self._role_replica(self._replicas[replica]).receive_kv(attempt.job, cached_tokens)
        self._settle_numbers[replica] += 1
        self._settle(replica, self._settle_numbers[replica])
