"""Routers share a full replica, although those that fill it know first of free places."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from isochrone.wire.ids import ReplicaId
from nodeagent.decide.requests.admission import ReplicaAdmission
from nodeagent.decide.requests.router_shares import WAITING_S, RouterShares
from router.decide.replicas.full_replicas import ASK_AGAIN_S, FullReplicas

R = ReplicaId("r1")
TENANT = "acme"
SEQUENCES = 16
REPORT_S = 1.0


def test_a_router_leaves_places_to_those_that_wait_and_have_fewer() -> None:
    shares = RouterShares(left_max=2)
    for router in ("a", "a", "a", "b", "b"):
        shares.record_begin(router)
    for router in ("a", "b", "c"):
        shares.record_refusal(router, 10.0)
    assert [shares.places_left(router, 10.0) for router in "abc"] == [2, 1, 0]
    assert shares.places_left("b", 10.0, to_all=True) == 2, "but not more than `left_max`"
    shares.record_begin("c")
    assert [shares.places_left(router, 10.0) for router in "abc"] == [1, 0, 0]
    shares.record_end("a")
    assert shares.places_left("a", 10.0) == 0, "it has as many as the other"
    assert shares.places_left("b", 10.0 + 2 * WAITING_S) == 0
    assert not shares._refused_at_s, "those that no longer wait are forgotten"


class SharedReplica:
    """Routers with endless queues of one tenant at one replica, on a clock of its own."""

    def __init__(self, seed: int, delays_s: dict[str, float]) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.delays_s = delays_s
        self.admission = ReplicaAdmission(1_000_000, sequences_max=SEQUENCES)
        self.full = {router: FullReplicas() for router in delays_s}
        self.own: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def begin(self, router: str) -> None:
        """Let a router look for places from now on, and hear of the load."""

        def look_again() -> None:
            self.look(router)
            self.after(ASK_AGAIN_S, look_again)

        def report() -> None:
            self.others[router] = self.admission.running - self.own[router]
            self.after(REPORT_S, report)

        report()
        look_again()

    def look(self, router: str) -> None:
        """Send requests while the replica does not seem to be full."""
        full, key = self.full[router], (TENANT, False)

        def requests(replica_id: ReplicaId) -> int:
            return self.own[router] + max(0, self.others[router])

        while not full.full_for(key, requests, self.now_s) and self.own[router] < 3 * SEQUENCES:
            full.record_sent(key, R, requests(R), self.now_s)
            self.own[router] += 1
            self.asked[router] += 1
            self.after(self.delays_s[router], lambda: self.arrive(router))

    def arrive(self, router: str) -> None:
        """Let the node admit or refuse a request."""
        reservation = self.admission.admit(
            10, 10, router=router, generates_for=TENANT, now_s=self.now_s
        )
        running, delay_s, key = self.admission.running, self.delays_s[router], (TENANT, False)

        def requests() -> int:
            return self.own[router] + max(0, self.others[router])

        def refused() -> None:
            self.own[router] -= 1
            self.full[router].record_refusal(key, R, min(running, requests()), self.now_s)
            self.look(router)

        def answered() -> None:
            self.full[router].record_answer(key, R, min(running, requests()))
            self.own[router] -= 1
            self.served[router] += 1
            self.look(router)

        def ends() -> None:
            assert reservation is not None
            reservation.release()
            self.after(delay_s, answered)

        if reservation is None:
            self.after(delay_s, refused)
        else:
            self.after(self.rng.uniform(3.0, 5.0), ends)


@pytest.mark.parametrize("later", [{"far": 0.08}, {"same": 0.001, "middle": 0.02, "far": 0.08}])
@pytest.mark.parametrize("seed", range(3))
def test_routers_that_come_later_get_their_share(seed: int, later: dict[str, float]) -> None:
    replica = SharedReplica(seed, {"near": 0.001, **later})
    replica.begin("near")
    replica.run(20.0)
    for router in later:
        replica.begin(router)
    replica.run(60.0)
    replica.served.clear()
    replica.asked.clear()
    replica.run(160.0)
    total = replica.served.total()
    assert total > 0.95 * 100 * SEQUENCES / 4.0, "no sequence stays free"
    assert all(0.6 < replica.served[name] * (1 + len(later)) / total < 1.4 for name in later)
    assert replica.asked.total() < 4 * total, "few ask in vain"
