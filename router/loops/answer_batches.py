"""Answers items of batches with capacity that interactive requests leave free; returns the results.

Items are leased from the scheduler a little ahead of their turn and answered like other requests,
at the lowest priority. A turn sends results, renews leases and leases more. An item whose lease was
lost is dropped: another router answers it, or its batch has ended. An item that a node preempted
for a client's request stays here and is sent again in the next turn, before others.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from isochrone.service.failure_log import RepeatedWarning
from isochrone.wire.errors import ApiError
from isochrone.wire.peers import batches as wire
from isochrone.wire.peers import relay
from isochrone.wire.peers.batches import (
    ItemRef,
    ItemResult,
    ItemResults,
    LeasedItem,
    LeasedItems,
    LeaseItems,
)
from isochrone.wire.peers.routes import DeploymentEntry, Route
from router.decide.admission.batch_capacity import (
    QUEUE_FACTOR,
    PreemptedItem,
    ReplicaOccupancy,
    requests_max,
)
from router.fleet_state import FleetState
from router.scheduler_client import SchedulerClient

log = logging.getLogger(__name__)

OUTPUT_TOKENS_ASSUMED: Final = 256
BYTES_PER_TOKEN: Final = 4
RESULT_BYTES_MAX: Final = relay.WORK_BYTES_MAX // 2
HOLDS_MAX: Final = 4 * wire.LEASED_MAX
"""The leases that one message renews."""

AnswerItem = Callable[[LeasedItem, int], Awaitable[ItemResult | PreemptedItem]]
"""Answers an item that was preempted so many times before."""

_LEASED: Final = msgspec.msgpack.Decoder(LeasedItems)


class AnsweredCounts(NamedTuple):
    """Counts of one turn's work."""

    leased: int
    returned: int


class DeploymentWork:
    """The items of one deployment that this router holds."""

    def __init__(self) -> None:
        self.waiting: deque[LeasedItem] = deque()
        self.running: dict[ItemRef, asyncio.Task[None]] = {}
        self.preempted: list[LeasedItem] = []
        """Items that wait for the next turn."""
        self.preemptions: dict[ItemRef, int] = {}
        """How often an item was preempted, if it was."""
        self.item_tokens = 2 * OUTPUT_TOKENS_ASSUMED
        """The average of the tokens that recent items were expected to take."""

    @property
    def refs(self) -> list[ItemRef]:
        """The items held, waiting or running."""
        return [*self.running, *[item.ref for item in (*self.preempted, *self.waiting)]]

    def drop(self, lost: Collection[ItemRef]) -> None:
        """Forget items, and stop those that run."""
        for ref in lost:
            self.preemptions.pop(ref, None)
            # A task that is cancelled before its first step would not remove itself.
            task = self.running.pop(ref, None)
            if task is not None:
                task.cancel()
        self.waiting = deque(item for item in self.waiting if item.ref not in lost)
        self.preempted = [item for item in self.preempted if item.ref not in lost]


class AnswerBatches:
    """The periodic job of a router's main process."""

    def __init__(
        self,
        *,
        client: SchedulerClient,
        fleet: FleetState,
        answer: AnswerItem,
        is_busy: Callable[[], bool],
        is_draining: Callable[[], bool],
        per_replica_max: int | None,
    ) -> None:
        """`is_busy` says whether requests of clients wait for capacity.

        A router that `is_draining` finishes the items that run, and starts and leases no others.
        Without `per_replica_max`, a replica's limit follows from its engine's sequences.
        """
        self._client = client
        self._fleet = fleet
        self._answer = answer
        self._is_busy = is_busy
        self._is_draining = is_draining
        self._per_replica_max = per_replica_max
        self._refusals = RepeatedWarning(log, "batch service")
        self._work: dict[str, DeploymentWork] = {}
        self._results: deque[ItemResult] = deque()

    async def run_once(self) -> AnsweredCounts:
        """Send results, renew leases, lease more items and start what may run."""
        access = self._client.access
        if not (access.token and access.has_batches) or self._per_replica_max == 0:
            return AnsweredCounts(0, 0)
        try:
            returned = await self._return_results()
            leased = await self._lease()
        except ApiError as error:
            # Results are kept, and the leases run for a while.
            self._refusals.record(error.message, self._fleet.clock())
            return AnsweredCounts(0, 0)
        for name, work in list(self._work.items()):
            work.waiting.extendleft(reversed(work.preempted))
            work.preempted.clear()
            self._start(name)
        return AnsweredCounts(leased, returned)

    def close(self) -> None:
        """Stop answering. The leases run out, and other routers answer the items."""
        for work in self._work.values():
            for task in work.running.values():
                task.cancel()

    async def _return_results(self) -> int:
        """Send all results; each is forgotten once the scheduler has stored it."""
        returned = 0
        while self._results:
            part: list[ItemResult] = []
            size_bytes = 0
            for result in self._results:
                size_bytes += len(result.body)
                if part and (len(part) == wire.LEASED_MAX or size_bytes > RESULT_BYTES_MAX):
                    break
                part.append(result)
            await self._client.post(wire.RESULTS_PATH, ItemResults(results=tuple(part)))
            for _ in part:
                self._results.popleft()
            returned += len(part)
        return returned

    async def _lease(self) -> int:
        """Renew the leases of the items held, and lease as many more as may run soon."""
        wanted: dict[str, int] = {}
        is_draining = self._is_draining()
        for entry in () if is_draining else self._fleet.directory.deployments:
            limit = min(wire.LEASED_MAX, QUEUE_FACTOR * self._requests_max(entry))
            work = self._work.get(entry.name)
            count = limit - (len(work.refs) if work is not None else 0)
            if count > 0 and len(wanted) < wire.LEASED_MAX:
                wanted[entry.name] = count
        holds = [ref for work in self._work.values() for ref in work.refs]
        if not wanted and not holds:
            return 0
        # Items are leased with the last message: an error of a later one would lose them.
        for begin in range(HOLDS_MAX, len(holds), HOLDS_MAX):
            await self._renew(holds[begin : begin + HOLDS_MAX], {})
        leased = await self._renew(holds[:HOLDS_MAX], wanted)
        for item in leased.items:
            # The scheduler has checked that the body names a model.
            name = self._fleet.directory.base_of(_MODEL.decode(item.body).model)
            self._work.setdefault(name, DeploymentWork()).waiting.append(item)
        return len(leased.items)

    async def _renew(self, holds: Sequence[ItemRef], wanted: dict[str, int]) -> LeasedItems:
        """Renew leases, forget items whose lease is lost, and return newly leased ones."""
        message = LeaseItems(wanted=wanted, holds=tuple(holds))
        leased = _LEASED.decode(await self._client.post(wire.LEASE_PATH, message))
        for work in self._work.values():
            work.drop(frozenset(leased.lost))
        return leased

    def _requests_max(self, entry: DeploymentEntry) -> int:
        """Return how many items of a deployment may run now."""
        if self._is_busy():
            return 0
        work = self._work.get(entry.name)
        now_s = self._fleet.clock()
        replicas = [
            self._occupancy(route, now_s)
            for route in self._fleet.routing(entry.deployment_id).routes
        ]
        return requests_max(
            replicas,
            len(work.running) if work is not None else 0,
            work.item_tokens if work is not None else 2 * OUTPUT_TOKENS_ASSUMED,
            per_replica_max=self._per_replica_max,
        )

    def _occupancy(self, route: Route, now_s: float) -> ReplicaOccupancy:
        """Return the load of a replica, and its limits."""
        in_flight = self._fleet.in_flight
        load = in_flight.load_of(route.replica_id)
        return ReplicaOccupancy(
            route.tokens_in_flight_max,
            in_flight.tokens_at(route.replica_id, now_s).tokens,
            load.sequences_max,
            load.requests + load.others_requests,
        )

    def _start(self, name: str) -> None:
        """Start waiting items of a deployment, as many as may run."""
        work = self._work[name]
        if self._is_draining():
            # Their leases run out, and other routers answer them.
            work.waiting.clear()
            work.preempted.clear()
        entry = self._fleet.directory.deployment(name)
        # Without the deployment each item gets its error at once.
        limit = self._requests_max(entry) if entry is not None else wire.LEASED_MAX
        while work.waiting and len(work.running) < limit:
            item = work.waiting.popleft()
            tokens = len(item.body) // BYTES_PER_TOKEN + OUTPUT_TOKENS_ASSUMED
            work.item_tokens = (7 * work.item_tokens + tokens) // 8
            work.running[item.ref] = asyncio.create_task(self._run(name, item))
        if not work.refs:
            del self._work[name]

    async def _run(self, name: str, item: LeasedItem) -> None:
        """Answer one item, and start the next one."""
        work = self._work[name]
        try:
            answer = await self._answer(item, work.preemptions.pop(item.ref, 0))
            if isinstance(answer, PreemptedItem):
                work.preemptions[item.ref] = answer.preemptions
                work.preempted.append(item)
            else:
                self._results.append(answer)
        finally:
            work.running.pop(item.ref, None)
        if name in self._work:
            self._start(name)


class _NamedModel(msgspec.Struct):
    model: str = ""


_MODEL: Final = msgspec.json.Decoder(_NamedModel)
