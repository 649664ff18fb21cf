"""The oracle: one mind for all cities that sees every queue and every cache as it is now.

It takes who gives the first token soonest, and charges a request its own prefill time `regard`
times more, for those who come after it: with 0 it is greedy and fills replicas with prompts that
another holds already. It sees also what is on the way. It does not see who will come.
"""

from ops.sim.replica import SimulatedReplica
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest


class OraclePolicy:
    """All routers share one."""

    def __init__(self, replicas: list[SimulatedReplica], regard: float) -> None:
        self._replicas = replicas
        self._regard = regard
        self._coming: list[dict[int, tuple[TraceRequest, float]]] = [{} for _ in replicas]
        """By replica: requests on their way, with their work."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Work out each replica's answer."""
        best, least_s = None, float("inf")
        for at in router.by_distance:
            if at in refused:
                continue
            replica = self._replicas[at]
            tokens = replica.prefill_tokens + replica.decode_tokens
            coming = self._coming[at].values()
            tokens += sum(one.prompt_tokens + OUTPUT_TOKENS_ASSUMED for one, _ in coming)
            wanted = request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
            if tokens and tokens + wanted > replica.site.profile.kv_tokens_max:
                continue
            cost_s = self._cost_s(router, at, request, now_s)
            if cost_s < least_s:
                best, least_s = at, cost_s
        return best

    def sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """See it on its way."""
        of = self._replicas[replica]
        work = of.work(request, of.cached(request, self._to_be_cached(replica)))
        self._coming[replica][request.number] = (request, work)

    def reached(self, request: TraceRequest, replica: int) -> None:
        """It is there."""
        del self._coming[replica][request.number]

    def _cost_s(
        self, router: SimulatedRouter, at: int, request: TraceRequest, now_s: float
    ) -> float:
        replica = self._replicas[at]
        speed = replica.read_speed()
        way_s = router.rtt_ms[at] / 2000
        waiting = sum(work for _, work in self._coming[at].values())
        queued: set[int] = set()
        for job in replica.queue:
            waiting += replica.work(job.request, replica.cached(job.request, queued))
            queued.update(job.request.blocks)
        if replica.reading is not None:
            waiting += replica.reading.work_left
        work = replica.work(request, replica.cached(request, self._to_be_cached(at)))
        wait_s = max(0.0, waiting / speed - way_s)
        return 2 * way_s + wait_s + (1 + self._regard) * work / speed

    def _to_be_cached(self, at: int) -> set[int]:
        blocks: set[int] = set()
        replica = self._replicas[at]
        if replica.reading is not None:
            blocks.update(replica.reading.request.blocks)
        for job in replica.queue:
            blocks.update(job.request.blocks)
        for request, _ in self._coming[at].values():
            blocks.update(request.blocks)
        return blocks
