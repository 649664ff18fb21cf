"""What every request leaves behind: metrics, demand for the planner, usage for the ledger.

Pure bookkeeping, never awaited: it also runs while a cancelled request unwinds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.routes import Route
from isochrone.wire.usage import DemandRow, UsageRow
from router.decide.rollout import TrialCounter
from router.journey import FAILED, REFUSED, Journey
from router.metrics import Metrics
from router.request_counts import DECLINED
from router.usage_journal import UsageJournal

USAGE_ROWS_MAX: Final = 100_000
"""Rows held in memory when the disk takes none; past it they are counted as lost."""


def _nothing() -> None:
    """Nobody is told."""


class _DemandCounts:
    """What was asked of one deployment in this window, so far."""

    def __init__(self) -> None:
        self.requests = self.prompt = self.uncached = self.output = 0
        self.refused = self.no_replica = 0

    def count(self, prompt: int, cached: int) -> None:
        """Count one request more."""
        self.requests += 1
        self.prompt += prompt
        self.uncached += prompt - cached


class Recorder:
    """Counts what ended, until the duty that ships it takes it away."""

    def __init__(self, pop: PopId, metrics: Metrics, journal: UsageJournal) -> None:
        """Count for the router's own PoP."""
        self._pop = pop
        self._metrics = metrics
        self.journal = journal
        self._usage: list[UsageRow] = list(journal.open())
        self._demand: dict[DeploymentId, _DemandCounts] = {}
        self._unserved_before: set[DeploymentId] = set()
        self.trials = TrialCounter(pop)
        self.on_unserved: Callable[[], None] = _nothing
        """Told when a deployment has no replica for who asks, and had one in the window before."""

    def record(self, journey: Journey, now_s: float) -> None:
        """Book one request that ended now."""
        asked = journey.asked
        prompt, cached, output = journey.used
        metrics = self._metrics.deployments[asked.deployment.name]
        metrics.outcomes[DECLINED if journey.is_declined else journey.outcome] += 1
        metrics.prompt += prompt
        metrics.cached += cached
        metrics.output += output
        first_s = journey.first_token_at_s
        if first_s is not None and journey.ranked is not None:
            metrics.ttft.observe(first_s - asked.arrived_s)
            metrics.ttft_error.observe((journey.took_ms - journey.ranked.ttft_ms) / 1000)
        self._add_demand(journey, prompt, cached, output)
        route = journey.route
        if route is None:
            return
        if asked.deployment.rollout is not None and journey.via is not None:
            self._add_trial(journey, route, output, now_s)
        if len(self._usage) >= USAGE_ROWS_MAX:
            self._metrics.usage_dropped.inc()
            return
        row = UsageRow(
            request_id=asked.request_id,
            key_id=asked.key.key_id,
            tenant_id=asked.key.tenant_id,
            deployment_id=asked.deployment_id,
            pop=route.pop,
            node_id=route.node_id,
            replica_id=route.replica_id,
            started_at=asked.started_at,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            outcome=journey.outcome,
            ttft_ms=1000 * (first_s - asked.arrived_s) if first_s is not None else 0.0,
            duration_ms=1000 * (now_s - asked.arrived_s),
        )
        self._usage.append(row)
        self.journal.append(row)

    def found_no_replica(self, journey: Journey) -> None:
        """Count who waits for a first replica while he waits: it is what wakes one."""
        asked = self._demand_of(journey)
        asked.no_replica += 1
        asked.count(journey.prompt_tokens_estimate, 0)
        if asked.no_replica == 1 and journey.asked.deployment_id not in self._unserved_before:
            self.on_unserved()

    def attempt_failed(self, journey: Journey) -> None:
        """Count a replica that failed under a request, whoever answers in the end."""
        if journey.route is not None:
            self.trials.record_attempt(journey.asked.deployment, journey.route, failed=True)

    def take_usage(self) -> tuple[tuple[UsageRow, ...], tuple[Path, ...]]:
        """Hand over the usage so far and its journal's files, `saved` once it is kept elsewhere."""
        self._metrics.flush_counts()
        rows = tuple(self._usage)
        self._usage.clear()
        return rows, self.journal.rotate()

    def put_back(self, rows: tuple[UsageRow, ...]) -> None:
        """Take back usage that the disk did not."""
        self._usage[:0] = rows

    def take_demand(self) -> tuple[DemandRow, ...]:
        """Hand over the demand of the window that ends now."""
        rows = tuple(
            DemandRow(
                deployment_id=deployment_id,
                pop=self._pop,
                requests=asked.requests,
                prompt_tokens=asked.prompt,
                uncached_tokens=asked.uncached,
                output_tokens=asked.output,
                refused=asked.refused,
                no_replica=asked.no_replica,
            )
            for deployment_id, asked in sorted(self._demand.items())
        )
        self._demand.clear()
        self._unserved_before = {row.deployment_id for row in rows if row.no_replica}
        return rows

    def _add_trial(self, journey: Journey, route: Route, output: int, now_s: float) -> None:
        output -= journey.said_before
        itl_ms = 0.0
        if journey.token_at_s and output > 1:
            itl_ms = 1000 * (now_s - journey.token_at_s) / (output - 1)
        self.trials.record_attempt(
            journey.asked.deployment,
            route,
            failed=journey.outcome is FAILED,
            ttft_ms=journey.took_ms,
            itl_ms=itl_ms,
        )

    def _add_demand(self, journey: Journey, prompt: int, cached: int, output: int) -> None:
        if journey.is_declined:
            # For what its client wrote: no replica more would have helped.
            return
        asked = self._demand_of(journey)
        if not journey.found_no_replica:
            # What was turned away wanted its prompt done too: the planner must see it.
            asked.count(prompt or journey.prompt_tokens_estimate, cached)
        asked.output += output
        asked.refused += journey.outcome is REFUSED

    def _demand_of(self, journey: Journey) -> _DemandCounts:
        deployment_id = journey.asked.deployment_id
        asked = self._demand.get(deployment_id)
        if asked is None:
            asked = self._demand[deployment_id] = _DemandCounts()
        return asked
