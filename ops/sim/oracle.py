"""The oracle: one policy for all cities that sees every queue and cache as it is now.

The oracle takes the replica that gives the first token soonest, and charges a request its own
prefill time `congestion_charge` times more, for the requests behind it. With 0 the oracle is
greedy, and fills replicas with prompts that another replica has cached. The oracle also sees the
requests on their way.

With `foresight` it knows one thing of the future: the next request of the same conversation, and
where it will come from. It charges, that many times, what the time to first token of that request
will be at least if this one is read here: a first turn goes where the later turns are answered
soonest. Of the oracles with all charges and both foresights the best one counts, for each figure
apart and with hindsight (`ops.sim.hard_table`), so that no single policy has to be best at all.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ops.sim.replica import SimulatedReplica
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld, pop_of_request


class NextTurn(NamedTuple):
    """The next request that begins with a request's whole prompt, and the PoP it will come from."""

    request: TraceRequest
    pop: int


def next_turns(requests: Sequence[TraceRequest], world: RoutingWorld) -> Mapping[int, NextTurn]:
    """Return the next turn of each request that has one, by number."""
    ended_by: dict[int, int] = {}
    turns: dict[int, NextTurn] = {}
    for request in requests:
        for block in request.blocks:
            number = ended_by.pop(block, None)
            if number is not None:
                turns[number] = NextTurn(request, pop_of_request(world, request))
        if request.blocks:
            ended_by[request.blocks[-1]] = request.number
    return turns


class ComingRequest(NamedTuple):
    """A request on its way to a replica, and its prefill work there."""

    request: TraceRequest
    work: float


class OraclePolicy:
    """One instance is shared by all routers."""

    def __init__(
        self,
        replicas: list[SimulatedReplica],
        congestion_charge: float,
        foresight: float = 0.0,
        turns: Mapping[int, NextTurn] | None = None,
    ) -> None:
        self._replicas = replicas
        self._congestion_charge = congestion_charge
        self._foresight = foresight
        self._turns = turns or {}
        self._coming: list[dict[int, ComingRequest]] = [{} for _ in replicas]
        """Requests on their way, by replica, then by number of the request."""

    def choose(
        self,
        router: SimulatedRouter,
        request: TraceRequest,
        refused: frozenset[int],
        now_s: float,
    ) -> int | None:
        """Compute the cost of each replica with capacity and return the lowest."""
        best, best_s = None, float("inf")
        needed = request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
        for number in router.by_distance:
            if number in refused:
                continue
            replica = self._replicas[number]
            tokens = replica.prefill_tokens + replica.decode_tokens
            tokens += sum(
                coming.request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
                for coming in self._coming[number].values()
            )
            if tokens and tokens + needed > replica.site.profile.kv_tokens_max:
                continue
            cost_s = self._cost_s(router, number, request, now_s)
            if cost_s < best_s:
                best, best_s = number, cost_s
        return best

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Note a request on its way."""
        target = self._replicas[replica]
        work = target.work(request, target.cached(request, self._blocks_to_come(replica)))
        self._coming[replica][request.number] = ComingRequest(request, work)

    def record_arrival(self, request: TraceRequest, replica: int) -> None:
        """Note that a request has arrived."""
        del self._coming[replica][request.number]

    def _cost_s(
        self, router: SimulatedRouter, number: int, request: TraceRequest, now_s: float
    ) -> float:
        """Return round trip, wait and charged prefill time of a request at a replica."""
        replica = self._replicas[number]
        speed = replica.read_speed()
        one_way_s = router.rtt_ms[number] / 2000
        waiting = sum(coming.work for coming in self._coming[number].values())
        queued: set[int] = set()
        for job in replica.queue:
            waiting += replica.work(job.request, replica.cached(job.request, queued))
            queued.update(job.request.blocks)
        waiting += replica.work_left(now_s)
        work = replica.work(request, replica.cached(request, self._blocks_to_come(number)))
        wait_s = max(0.0, waiting / speed - one_way_s)
        cost_s = 2 * one_way_s + wait_s + (1 + self._congestion_charge) * work / speed
        turn = self._turns.get(request.number)
        if turn is not None:
            cached = len(request.blocks) * request.block_tokens
            to_read = replica.work(turn.request, min(cached, turn.request.prompt_tokens - 1))
            rtt_s = router.world.rtt_to(turn.pop, number) / 1000
            cost_s += self._foresight * (rtt_s + to_read / replica.site.true_rate)
        return cost_s

    def _blocks_to_come(self, number: int) -> set[int]:
        """Return the blocks that a replica will have cached when it has read all before us."""
        blocks: set[int] = set()
        replica = self._replicas[number]
        if replica.reading is not None:
            blocks.update(replica.reading.request.blocks)
        for job in replica.queue:
            blocks.update(job.request.blocks)
        for coming in self._coming[number].values():
            blocks.update(coming.request.blocks)
        return blocks
