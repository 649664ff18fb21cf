"""Updates the fleet state from requests and probes: each event updates every part it concerns."""

from collections.abc import Mapping, Set

from isochrone.wire.http.headers import BUSY, ReportedLoad
from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.peers.routes import Route
from router.decide.attempt import FailureCause
from router.decide.caches.prefix_index import NO_KEYS, PrefixKeys, SentPrompt
from router.decide.choice.handoff import is_late_handoff
from router.decide.choice.peer_replicas import rounded
from router.decide.choice.prefill_replicas import PrefillReading
from router.decide.replicas.full_replicas import RequestGroup
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import Reservation
from router.fleet_state import FleetState


class AttemptFeedback:
    """Records the events of request attempts."""

    def __init__(self, fleet: FleetState) -> None:
        """Record into `fleet`."""
        self._fleet = fleet

    def reserve(
        self,
        route: Route,
        now_s: float,
        *,
        prefill: int,
        decode: int,
        prompt: int | None = None,
        is_batch_item: bool = False,
    ) -> Reservation:
        """Reserve a request's tokens before it is sent.

        `prefill` of the `prompt` tokens are not cached; without `prompt`, all are `prefill`.
        """
        fleet, replica_id = self._fleet, route.replica_id
        fleet.health.record_sent(replica_id, now_s)
        deployment = fleet.routing(route.deployment_id)
        slot = deployment.slot_of(replica_id)
        if slot < 0:
            return fleet.in_flight.reserve(replica_id, prefill=prefill, decode=decode)
        replicas, load = deployment.replicas, fleet.in_flight.load_of(replica_id)
        prompt = prompt or prefill
        return fleet.in_flight.reserve(
            replica_id,
            prefill=prefill,
            decode=decode,
            work_ms=replicas.prefill_time_ms(slot, prompt, prompt - prefill),
            arrives_s=now_s + fleet.nodes.rtt_ms(route) / 2000,
            others_ms=replicas.other_routers_ms(slot, load, now_s),
            is_batch_item=is_batch_item,
        )

    def record_sent(
        self, ranked: RankedRoute, now_s: float, keys: PrefixKeys = NO_KEYS
    ) -> SentPrompt | None:
        """Note that a request goes to a replica, which will cache its prompt.

        Return the record that `undo_sent` and `learn_cached_tokens` need, None if there is nothing
        to learn.
        """
        route = ranked.route
        deployment = self._fleet.routing(route.deployment_id)
        slot = deployment.slot_of(route.replica_id)
        if slot < 0:
            return None
        unhealthy = self._fleet.health.unhealthy()
        return deployment.record_sent(slot, ranked, keys, now_s, unhealthy)

    def undo_sent(self, route: Route, sent: SentPrompt | None, keys: PrefixKeys) -> None:
        """Note that the replica refused the request: it has not cached any of the prompt."""
        deployment = self._fleet.routing(route.deployment_id)
        if sent is not None and deployment.slot_of(route.replica_id) == sent.slot:
            deployment.undo_sent(sent, keys)

    def begin_prefill(
        self, deployment_id: DeploymentId, replica_id: ReplicaId, tokens: int, keys: PrefixKeys
    ) -> PrefillReading | None:
        """Note that a prefill replica reads a prompt of `tokens`.

        None if the table does not have it: an account of it would stay forever.
        """
        fleet = self._fleet
        if fleet.directory.route(replica_id) is None:
            return None
        readers = fleet.routing(deployment_id).prefill_replicas
        prompt = readers.record_sent(replica_id, keys, fleet.clock())
        uncached = tokens if prompt is None else rounded(tokens * (1 - prompt.share)) or 1
        reservation = fleet.in_flight.reserve(replica_id, prefill=uncached, decode=0)
        return PrefillReading(replica_id, reservation, prompt)

    def undo_prefill(
        self, deployment_id: DeploymentId, reading: PrefillReading, keys: PrefixKeys
    ) -> None:
        """Note that the prefill replica did not read the prompt after all."""
        reading.reservation.release()
        if reading.prompt is not None:
            readers = self._fleet.routing(deployment_id).prefill_replicas
            readers.undo_sent(reading.replica_id, reading.prompt, keys)

    def learn_prefill(
        self,
        deployment_id: DeploymentId,
        reading: PrefillReading,
        prompt_tokens: int,
        cached_tokens: int,
        keys: PrefixKeys,
    ) -> None:
        """Learn from an answer how much of its prompt the prefill replica had cached."""
        prompt = reading.prompt
        if prompt is None or prompt_tokens <= 0:
            return
        fleet, share = self._fleet, cached_tokens / prompt_tokens
        readers = fleet.routing(deployment_id).prefill_replicas
        readers.learn_cached_share(reading.replica_id, prompt, share, fleet.clock())
        fleet.prompt_outbox.add(deployment_id, reading.replica_id, prompt, keys)

    def record_answer_head(
        self,
        route: Route,
        load: ReportedLoad | None,
        refused: str = "",
        reservation: Reservation | None = None,
        group: RequestGroup | None = None,
    ) -> None:
        """Note the head of an answer: the node is alive, and this is the replica's load.

        `group` is that of the request, None for a probe.

        The load no longer includes the prompt of the answered request, which was refused or read.
        So finish or release its reservation before comparing, or that much of the other routers'
        load would be taken for our own.
        """
        fleet = self._fleet
        now_s = fleet.clock()
        answered_at_s = now_s - fleet.nodes.rtt_ms(route) / 2000
        if reservation is not None and refused:
            reservation.release(answered_at_s)
        elif reservation is not None:
            reservation.finish_prefill(answered_at_s)
        fleet.nodes.record_answer(route.node_id, now_s)
        if fleet.directory.route(route.replica_id) is None:
            # It left the route table and was dropped: a new record of it would stay forever.
            return
        fleet.nodes.record_refusal(route.replica_id, refused)
        if load is None:
            return
        fleet.record_load(route, load, answered_at_s)
        if group is None:
            return
        # Requests on their way count here and not there, and the others' were reported long ago.
        requests = min(load.running, fleet.in_flight.requests_at(route.replica_id))
        if refused == BUSY:
            fleet.full.record_refusal(group, route.replica_id, requests, now_s)
        elif not refused:
            fleet.full.record_answer(group, route.replica_id, requests)

    def record_handed_off_head(
        self, route: Route, load: ReportedLoad | None, reservation: Reservation
    ) -> None:
        """Note the head of an answer that another node relays from the replica that gave it."""
        fleet = self._fleet
        answered_at_s = fleet.clock() - fleet.nodes.rtt_ms(route) / 2000
        reservation.finish_prefill(answered_at_s)
        if load is not None and fleet.directory.route(route.replica_id) is not None:
            fleet.record_peer_load(route, load, answered_at_s)

    def record_first_token(
        self, ranked: RankedRoute, took_ms: float, reservation: Reservation
    ) -> None:
        """Note a first token that came `took_ms` after its request was sent."""
        fleet, route = self._fleet, ranked.route
        now_s = fleet.clock()
        reservation.finish_prefill(now_s - ranked.rtt_ms / 2000)
        deployment = fleet.routing(route.deployment_id)
        slot = deployment.slot_of(route.replica_id)
        if slot >= 0:
            deployment.replicas.learn_first_token(slot, ranked, took_ms, now_s)
            deployment.changed.add(route.replica_id)

    def record_success(self, route: Route) -> None:
        """Note a good answer; a replica that becomes healthy by it begins in slow start."""
        if self._fleet.health.record_success(route.replica_id):
            self._fleet.slow_start.begin((route.replica_id,), self._fleet.clock())

    def record_failure(self, route: Route, cause: FailureCause = FailureCause.BROKEN) -> str:
        """Note a failed request; return the cause if that ejects the replica, else ""."""
        fleet = self._fleet
        if cause is FailureCause.SLOW_CLIENT:
            return ""
        if fleet.directory.route(route.replica_id) is None:
            return ""
        peers = list(fleet.routing(route.deployment_id).replicas.slots)
        return fleet.health.record_failure(route.replica_id, fleet.clock(), peers)

    def record_handed_off(self, target: Route, peer: Route) -> None:
        """Note that a node handed a request off."""
        health, now_s = self._fleet.handoff_health, self._fleet.clock()
        for route in (target, peer):
            health.record_sent(route.replica_id, now_s)

    def record_handoff_answer(self, target: RankedRoute, peer: Route, took_ms: float) -> None:
        """Note the answer to a request that was handed off; its first token took `took_ms`."""
        is_late = is_late_handoff(took_ms, target.ttft_ms)
        self.record_handoff_end(target.route, peer, FailureCause.SILENT if is_late else None)

    def record_handoff_end(
        self, target: Route, peer: Route, cause: FailureCause | None = None
    ) -> None:
        """Note the end of a request that was handed off, and why it failed, if it did.

        Either replica may be at fault.
        """
        if cause is FailureCause.SLOW_CLIENT:
            return
        fleet = self._fleet
        for route in (target, peer):
            if cause is None:
                fleet.handoff_health.record_success(route.replica_id)
            elif fleet.directory.route(route.replica_id) is not None:
                fleet.handoff_health.record_failure(route.replica_id, fleet.clock())

    def learn_cached_tokens(
        self,
        route: Route,
        sent: SentPrompt | None,
        prompt_tokens: int,
        cached_tokens: int,
        keys: PrefixKeys,
    ) -> None:
        """Learn from an answer how much of its prompt was cached, and share that with peers."""
        if prompt_tokens <= 0:
            return
        deployment = self._fleet.routing(route.deployment_id)
        share = cached_tokens / prompt_tokens
        deployment.replicas.learn_uncached_share(1.0 - share)
        if sent is not None and deployment.slot_of(route.replica_id) == sent.slot:
            deployment.learn_cached_share(sent, share, self._fleet.clock())
            self._fleet.prompt_outbox.add(route.deployment_id, route.replica_id, sent, keys)


class ProbeFeedback:
    """Records the results of probes."""

    def __init__(self, fleet: FleetState) -> None:
        """Record into `fleet`."""
        self._fleet = fleet

    def record_ping(
        self, node_id: NodeId, rtt_ms: float, loads: Mapping[ReplicaId, ReportedLoad]
    ) -> None:
        """Note the answer to a ping: the round trip, and the loads of the node's replicas."""
        fleet = self._fleet
        self.record_round_trip(node_id, rtt_ms)
        answered_at_s = fleet.clock() - rtt_ms / 2000
        for replica_id in fleet.directory.replicas_on(node_id):
            load, route = loads.get(replica_id), fleet.directory.route(replica_id)
            if load is not None and route is not None:
                fleet.record_load(route, load, answered_at_s)
                fleet.record_pace(route, load, answered_at_s)

    def record_relayed(
        self, node_id: NodeId, age_s: float, loads: Mapping[ReplicaId, ReportedLoad]
    ) -> Set[DeploymentId]:
        """Note the loads of a node that another node of its PoP has read `age_s` ago.

        They count the requests of all routers, this one's too. Return the deployments concerned.
        """
        deployment_ids = set()
        fleet = self._fleet
        now_s = fleet.clock()
        fleet.nodes.record_answer(node_id, now_s - age_s)
        for replica_id in fleet.directory.replicas_on(node_id):
            load, route = loads.get(replica_id), fleet.directory.route(replica_id)
            if load is None or route is None:
                continue
            deployment_ids.add(route.deployment_id)
            reported_at_s = now_s - age_s - fleet.nodes.rtt_ms(route) / 2000
            fleet.record_cache_age(route, load, reported_at_s)
            fleet.record_pace(route, load, reported_at_s)
            if load.others_pending_prefill_tokens < 0:
                continue
            fleet.in_flight.record_report(
                replica_id,
                load.others_pending_prefill_tokens,
                load.others_decode_tokens,
                reported_at_s,
            )
        return deployment_ids

    def record_round_trip(self, node_id: NodeId, rtt_ms: float) -> None:
        """Note that a node answered a ping after `rtt_ms`."""
        self._fleet.nodes.record_round_trip(node_id, rtt_ms, self._fleet.clock())
        for replica_id in self._fleet.directory.replicas_on(node_id):
            self._fleet.note_change(replica_id)

    def record_ping_timeout(self, node_id: NodeId) -> None:
        """Note that a node did not answer a ping: postpone requests to its ejected replicas."""
        fleet = self._fleet
        fleet.nodes.record_timeout(node_id)
        for replica_id in fleet.health.unhealthy():
            route = fleet.directory.route(replica_id)
            if route is not None and route.node_id == node_id:
                fleet.health.postpone_half_open(replica_id, fleet.clock())

    def eject_node(self, node_id: NodeId) -> int:
        """Eject the replicas of a lost node; return how many were not ejected before."""
        now_s = self._fleet.clock()
        replica_ids = self._fleet.directory.replicas_on(node_id)
        return sum(self._fleet.health.eject_lost(replica_id, now_s) for replica_id in replica_ids)
