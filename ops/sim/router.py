"""What one PoP's router knows in a simulation: its own requests exactly, all else by old words.

Every policy gets the same: the load of each replica as it was sampled every half `age_s` and told
as long after, so half to whole of `age_s` old; the load in the head of each answer; and what this
router itself has sent and not seen the end of. Ours keeps its own beliefs: the router's `Fleet`.
"""

from bisect import bisect_right
from typing import NamedTuple

from isochrone.wire.headers import ReportedLoad
from ops.sim.replica import Replica
from ops.sim.traces import Request
from ops.sim.world import World

OUTPUT_TOKENS_ASSUMED = 512


class Believed(NamedTuple):
    """A replica's load as a router may believe it: others' by old words, its own by count."""

    requests: int
    prefill_tokens: int
    decode_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens there."""
        return self.prefill_tokens + self.decode_tokens


class Router:
    """One PoP's own counts and the words it has heard."""

    def __init__(self, pop: int, world: World, replicas: list[Replica], age_s: float) -> None:
        self.pop = pop
        self.world = world
        self.replicas = replicas
        self.rtt_ms = [world.rtt_to(pop, site.replica) for site in world.sites]
        self.by_distance = sorted(range(len(replicas)), key=lambda r: (self.rtt_ms[r], r))
        self._tick_s = age_s / 2
        count = len(replicas)
        self.requests = [0] * count
        self.prefill = [0] * count
        self.decode = [0] * count
        self._answered_at_s = [0.0] * count
        self._past_at_s: list[list[float]] = [[-1.0] for _ in range(count)]
        self._past: list[list[tuple[int, int, int]]] = [[(0, 0, 0)] for _ in range(count)]

    def told_at_s(self, now_s: float) -> float:
        """Return when the newest word that is here by now was true."""
        return max(0.0, int(now_s / self._tick_s) - 1) * self._tick_s

    def word(self, replica: int, now_s: float) -> tuple[float, ReportedLoad]:
        """Return when and what a replica's newest word was."""
        at_s = max(self.told_at_s(now_s), self._answered_at_s[replica])
        return at_s, self.replicas[replica].load_at(at_s, self.pop)

    def answered(self, replica: int, at_s: float) -> ReportedLoad:
        """An answer came whose head was written at `at_s`: it carries the load."""
        self._answered_at_s[replica] = max(self._answered_at_s[replica], at_s)
        return self.replicas[replica].load_at(at_s, self.pop)

    def believed(self, replica: int, now_s: float) -> Believed:
        """Return the load of a replica: what is not ours by its word, and what is ours now."""
        at_s, load = self.word(replica, now_s)
        # Ours is there half a round trip after we counted it.
        at = bisect_right(self._past_at_s[replica], at_s - self.rtt_ms[replica] / 2000) - 1
        requests, prefill, decode = self._past[replica][max(0, at)]
        return Believed(
            self.requests[replica] + max(0, load.running - requests),
            self.prefill[replica] + max(0, load.prefill_tokens - prefill),
            self.decode[replica] + max(0, load.decode_tokens - decode),
        )

    def has_room(self, believed: Believed, replica: int, request: Request) -> bool:
        """Say whether the request fits there, as far as is known."""
        wanted = request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
        most = self.world.sites[replica].profile.kv_tokens_max
        return not believed.tokens or believed.tokens + wanted <= most

    def count(self, replica: int, requests: int, prefill: int, decode: int, now_s: float) -> None:
        """Count what was sent, read or ended."""
        self.requests[replica] += requests
        self.prefill[replica] += prefill
        self.decode[replica] += decode
        self._past_at_s[replica].append(now_s)
        self._past[replica].append(
            (self.requests[replica], self.prefill[replica], self.decode[replica])
        )
