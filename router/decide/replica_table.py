"""What the choice knows of one deployment: a slot for each replica, with rows of plain numbers.

Rows are never changed, only replaced, so that a picture of hundreds of replicas is a copy of two
lists, and ranking them a few passes. A slot belongs to a replica for as long as a table names it;
another may get it later.
"""

from collections.abc import Mapping, Sequence, Set
from math import inf
from typing import Final, TypeAlias

from isochrone.wire.ids import PopId, ReplicaId
from isochrone.wire.routes import Route
from router.decide.affinity import hash64
from router.decide.latency import (
    UNUSED_REPLICA_MS,
    DepthCost,
    LatencyCorrection,
    moving_average,
    prefill_ms,
    prefill_work,
)
from router.decide.tokens_in_flight import ReplicaLoad

HOME_RATIO: Final = 1.1
HOME_MS: Final = 2.0
"""Replicas this little farther than the nearest are at home: going elsewhere is a spill."""

SPILL_LASTS_MS: Final = 2000.0

CONGESTION_CHARGE_MAX: Final = 1.2
"""How much of its prefill time a request is charged once more, for those who come after it, where
all it waits for is a queue; as much less as queues are less of the time to a first token."""

QUEUED_SMOOTHING: Final = 0.02

QUEUE_SHARE_MAX: Final = 0.1
"""With more queue than this share of the prompt's own time, an answer tells little of depth."""


Times: TypeAlias = tuple[float, float, float, float]
"""Of a slot (until, least, ms per token, room): all that a request's time there takes.

Until when the queue is through, less the time a request takes to get there; what waits there at
least, whatever the clock says; both with the round trip and all overhead in them. Room is how many
tokens more it takes: any number where it is idle, for whether a request fits at all is the
replica's to say; none where a slot has no replica.
"""

Facts: TypeAlias = tuple[float, float, float, float, float]
"""Of a slot (round trip, the same with all overhead, usual error, tokens in flight, guess); in ms.

The guess is what of the wait there is only usual, and not told of by any word.
"""


class RankedRoute:
    """One way to go, with what is predicted of it and why it stands where it stands.

    `unread_tokens` is as much work as the uncached ones are, in tokens at a prompt's beginning.
    With more than `queue_tokens_max` waiting there, the next best would be sooner after all.
    """

    __slots__ = (
        "cached_tokens",
        "overhead_ms",
        "pending_prefill_tokens",
        "prefill_ms",
        "queue_ms",
        "queue_tokens_max",
        "reason",
        "route",
        "rtt_ms",
        "uncached_tokens",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        reason: str,
        *,
        rtt_ms: float,
        overhead_ms: float,
        queue_ms: float,
        prefill_ms: float,
        cached_tokens: int,
        uncached_tokens: int,
        pending_prefill_tokens: int,
        queue_tokens_max: int,
    ) -> None:
        self.route = route
        self.reason = reason
        self.rtt_ms = rtt_ms
        self.overhead_ms = overhead_ms
        self.queue_ms = queue_ms
        self.prefill_ms = prefill_ms
        self.cached_tokens = cached_tokens
        self.uncached_tokens = uncached_tokens
        self.pending_prefill_tokens = pending_prefill_tokens
        self.queue_tokens_max = queue_tokens_max

    @property
    def ttft_ms(self) -> float:
        """Predicted time to first token."""
        return max(0.0, self.rtt_ms + self.overhead_ms + self.queue_ms + self.prefill_ms)

    @property
    def reason_header(self) -> str:
        """The header value that tells a client why this replica."""
        tenths, queue_ms = int(10 * self.rtt_ms + 0.5), int(self.queue_ms + 0.5)
        prefill_ms = int(self.prefill_ms + 0.5)
        return (
            f"{self.reason} rtt={tenths // 10}.{tenths % 10}ms queue={queue_ms}ms"
            f" prefill={prefill_ms}ms"
        )


class ReplicaTable:
    """The rows of one deployment, kept up to date slot by slot."""

    def __init__(self) -> None:
        """Begin without replicas."""
        self.slots: dict[ReplicaId, int] = {}
        self.routes: list[Route | None] = []
        self.paces: list[LatencyCorrection] = []
        self.spilled_at_ms = -inf
        self.stretch = DepthCost()
        self.uncached_share = 1.0
        """Of prompts, as a rule: for nodes that do not tell what they have not read yet."""
        self.queued_share = 0.0
        self._free: list[int] = []
        self._home: frozenset[int] | None = None
        self.mates: dict[PopId, list[int]] = {}
        self.everyone = 0
        """The mask of all slots that have a replica."""
        self.times: list[Times] = []
        self.facts: list[Facts] = []
        self.seeds: list[int] = []
        self.weights: list[float] = []

    def __len__(self) -> int:
        """Return how many slots there are, those without a replica included."""
        return len(self.routes)

    def adopt(self, routes: Sequence[Route]) -> Set[int]:
        """Seat these replicas and no others; return the slots that lost theirs."""
        named = {route.replica_id for route in routes}
        left = set()
        # Pictures share these: what they show stays as it was.
        self.slots, self.routes = self.slots.copy(), self.routes.copy()
        self.seeds, self.weights = self.seeds.copy(), self.weights.copy()
        for replica_id in [replica_id for replica_id in self.slots if replica_id not in named]:
            slot = self.slots.pop(replica_id)
            self._clear(slot)
            left.add(slot)
        for route in routes:
            slot = self.slots.get(route.replica_id, -1)
            if slot < 0:
                slot = self._seat(route)
            self.routes[slot] = route
            self.weights[slot] = max(1.0, route.prefill_tokens_per_s)
        self._home = None
        self.mates = {}
        for route in routes:
            self.mates.setdefault(route.pop, []).append(self.slots[route.replica_id])
        self.everyone = sum(1 << slot for slot in self.slots.values())
        return left

    def refresh(self, slot: int, rtt_ms: float, line: ReplicaLoad, now_s: float) -> None:
        """Bring one replica's numbers up to date."""
        route = self.routes[slot]
        if route is None:
            return
        if rtt_ms != self.facts[slot][0]:
            self._home = None
        pace = self.paces[slot]
        gain, overhead_ms = pace.at(now_s)
        cold_ms = 0.0 if pace.answers else UNUSED_REPLICA_MS
        ms_per_token = prefill_ms(1, route.prefill_tokens_per_s) * gain
        told, usual, others_decode = line.others.at(now_s)
        others = told + usual
        base_ms = rtt_ms + cold_ms + overhead_ms
        tokens = line.prefill + line.decode + others + others_decode
        self.facts[slot] = (rtt_ms, base_ms, pace.spread_ms, tokens, usual * ms_per_token)
        self.times[slot] = (
            base_ms + 1000 * line.free_at_s - rtt_ms / 2,
            base_ms + line.behind_first_ms + others * ms_per_token,
            ms_per_token,
            route.tokens_in_flight_max - tokens if tokens >= 1 else inf,
        )

    def work_ms(self, slot: int, prompt_tokens: float, cached_tokens: float) -> float:
        """Return how long a replica reads what it has not cached of a prompt."""
        work = prefill_work(prompt_tokens, cached_tokens, self.stretch.per_token)
        return work * self.times[slot][2]

    def observed(self, slot: int, ranked: RankedRoute, took_ms: float, now_s: float) -> None:
        """Learn from a first token that came `took_ms` after its request went."""
        pace = self.paces[slot]
        raw_ms = (ranked.queue_ms + ranked.prefill_ms) / pace.at(now_s)[0]
        computed_ms = ranked.queue_ms + ranked.prefill_ms
        certainty = ranked.prefill_ms / computed_ms if computed_ms > 0 else 1.0
        error_ms = pace.observed(raw_ms, took_ms - ranked.rtt_ms, now_s, certainty * certainty)
        if ranked.queue_ms < QUEUE_SHARE_MAX * ranked.prefill_ms:
            depth = ranked.cached_tokens + ranked.uncached_tokens / 2
            self.stretch.observed(ranked.prefill_ms, depth, error_ms)

    @property
    def home(self) -> frozenset[int]:
        """Return the slots of the nearest replicas."""
        if self._home is None:
            self._home = self._find_home()
        return self._home

    def others_ms(self, slot: int, line: ReplicaLoad, now_s: float) -> float:
        """Return how long what others have waiting at a replica takes it."""
        told, usual, _ = line.others.at(now_s)
        return (told + usual) * self.times[slot][2]

    def went(self, slot: int, ranked: RankedRoute, now_s: float) -> None:
        """A request goes there: note whether it is away from home, and whether it must wait."""
        if slot not in self.home:
            self.spilled_at_ms = 1000 * now_s
        queued_share = ranked.queue_ms / max(1.0, ranked.ttft_ms)
        self.queued_share += QUEUED_SMOOTHING * (min(1.0, queued_share) - self.queued_share)

    def learned_uncached(self, share: float) -> None:
        """An answer told which share of its prompt was not cached."""
        self.uncached_share = moving_average(self.uncached_share, share, 0.02)

    def _find_home(self) -> frozenset[int]:
        seated = list(self.slots.values())
        if not seated:
            return frozenset()
        limit_ms = HOME_RATIO * min(self.facts[slot][0] for slot in seated) + HOME_MS
        return frozenset(slot for slot in seated if self.facts[slot][0] <= limit_ms)

    def _seat(self, route: Route) -> int:
        if self._free:
            slot = self._free.pop()
            self.seeds[slot] = hash64(route.replica_id)
            self.paces[slot] = LatencyCorrection()
        else:
            slot = len(self.routes)
            self.routes.append(route)
            self.paces.append(LatencyCorrection())
            self.seeds.append(hash64(route.replica_id))
            self.weights.append(1.0)
            self.times.append((0.0, 0.0, 0.0, -1.0))
            self.facts.append((0.0, 0.0, 0.0, 0.0, 0.0))
        self.slots[route.replica_id] = slot
        return slot

    def _clear(self, slot: int) -> None:
        self.routes[slot] = None
        self.times[slot] = (0.0, 0.0, 0.0, -1.0)
        self.facts[slot] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._free.append(slot)


class RoutingSnapshot:
    """What the router believes of one deployment, frozen: what happens later does not change it.

    `mates` are the slots of each PoP, `starting` who takes only a share yet (slow_start.py).
    """

    def __init__(
        self,
        board: ReplicaTable,
        now_s: float,
        ejected_until: Mapping[ReplicaId, float],
        starting: Mapping[ReplicaId, float],
    ) -> None:
        """Show everything as it is now."""
        self.now_ms = 1000 * now_s
        self.slots, self.routes, self.mates = board.slots, board.routes, board.mates
        self.seeds, self.weights, self.home = board.seeds, board.weights, board.home
        self.times, self.facts = board.times.copy(), board.facts.copy()
        self.stretch_per_token = board.stretch.per_token
        self.congestion_charge = CONGESTION_CHARGE_MAX * board.queued_share
        self.is_spilling = self.now_ms - board.spilled_at_ms < SPILL_LASTS_MS
        self.ejected_until = ejected_until
        self.starting = starting
