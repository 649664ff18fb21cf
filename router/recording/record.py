"""Records each request that ended: metrics, demand for the planner, usage for billing.

Nothing here is awaited, so it also works while a cancelled request unwinds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.peers.routes import Route
from isochrone.wire.peers.usage import DemandRow, UsageRow
from router.dataplane.usage_count import UsageCount
from router.decide.routes.rollout import TrialCounter
from router.recording.metrics import Metrics
from router.recording.request_counts import DECLINED
from router.recording.usage_journal import UsageJournal
from router.request_context import OUTCOME_FAILED, OUTCOME_REFUSED, RequestContext

USAGE_ROWS_MAX: Final = 100_000
"""Rows kept in memory while the disk takes none; more are dropped and counted."""


def _ignore() -> None:
    """Do nothing."""


class _DemandCounts:
    """Demand for one deployment in the current window."""

    def __init__(self) -> None:
        self.requests = self.prompt = self.uncached = self.output = 0
        self.refused = self.no_replica = 0

    def add_request(self, prompt: int, cached: int) -> None:
        """Count one request and its prompt tokens."""
        self.requests += 1
        self.prompt += prompt
        self.uncached += prompt - cached


class Recorder:
    """Collects demand, usage and trials until `ReportShipper` takes them."""

    def __init__(self, pop: PopId, metrics: Metrics, journal: UsageJournal) -> None:
        """Count for this router's own PoP, starting with the usage that an earlier run left."""
        self._pop = pop
        self._metrics = metrics
        self.journal = journal
        self._usage: list[UsageRow] = list(journal.open())
        self._demand: dict[DeploymentId, _DemandCounts] = {}
        self._unserved_before: set[DeploymentId] = set()
        self.trials = TrialCounter(pop)
        self.on_unserved: Callable[[], None] = _ignore
        """Called when a request finds a deployment without a replica for the first time in two
        windows."""

    def record(self, context: RequestContext, usage: UsageCount, now_s: float) -> None:
        """Record a request that ended now, and has used that."""
        request = context.request
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
        counts = self._metrics.deployments[request.deployment.name]
        counts.outcomes[DECLINED if context.is_declined else context.outcome] += 1
        counts.prompt += prompt
        counts.cached += cached
        counts.output += output
        first_s = context.times.first_token_at_s
        if first_s is not None and context.attempt is not None:
            counts.ttft.observe(first_s - request.arrived_s)
            counts.ttft_error.observe(
                (context.times.attempt_ttft_ms - context.attempt.ranked.ttft_ms) / 1000
            )
            if output > 1:
                counts.decode_s += now_s - first_s
                counts.decode_tokens += output - 1
        self._add_demand(context, prompt, cached, output)
        route = context.route
        if route is None:
            return
        # A declined request says nothing about the version: neither good nor bad.
        is_trial = request.deployment.rollout is not None and not context.is_declined
        if is_trial and context.has_uncounted_attempt:
            self._add_trial(context, route, output, now_s)
        if len(self._usage) >= USAGE_ROWS_MAX:
            self._metrics.usage_dropped.inc()
            return
        row = UsageRow(
            request_id=request.request_id,
            key_id=request.key.key_id,
            tenant_id=request.tenant_id,
            deployment_id=request.deployment_id,
            pop=route.pop,
            node_id=route.node_id,
            replica_id=route.replica_id,
            started_at=request.started_at,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            outcome=context.outcome,
            ttft_ms=1000 * (first_s - request.arrived_s) if first_s is not None else 0.0,
            duration_ms=1000 * (now_s - request.arrived_s),
        )
        self._usage.append(row)
        self.journal.append(row, now_s)

    def found_no_replica(self, context: RequestContext) -> None:
        """Count a request that waits for a first replica now: its demand starts one."""
        demand = self._demand_of(context)
        demand.no_replica += 1
        demand.add_request(context.prompt_tokens_estimate, 0)
        if demand.no_replica == 1 and context.request.deployment_id not in self._unserved_before:
            self.on_unserved()

    def take_usage(self) -> tuple[tuple[UsageRow, ...], tuple[Path, ...]]:
        """Return the usage so far, and the journal files to remove once it is in a batch."""
        self._metrics.flush_counts()
        rows = tuple(self._usage)
        self._usage.clear()
        return rows, self.journal.rotate()

    def put_back(self, rows: tuple[UsageRow, ...]) -> None:
        """Take back usage that could not be written to disk."""
        self._usage[:0] = rows

    def take_demand(self) -> tuple[DemandRow, ...]:
        """Return the demand of the window that ends now, and start a new window."""
        rows = tuple(
            DemandRow(
                deployment_id=deployment_id,
                pop=self._pop,
                requests=demand.requests,
                prompt_tokens=demand.prompt,
                uncached_tokens=demand.uncached,
                output_tokens=demand.output,
                refused=demand.refused,
                no_replica=demand.no_replica,
            )
            for deployment_id, demand in sorted(self._demand.items())
        )
        self._demand.clear()
        self._unserved_before = {row.deployment_id for row in rows if row.no_replica}
        return rows

    def _add_trial(self, context: RequestContext, route: Route, output: int, now_s: float) -> None:
        """Count the last attempt for its version."""
        output -= context.times.tokens_before
        itl_ms = 0.0
        if context.times.attempt_token_at_s and output > 1:
            itl_ms = 1000 * (now_s - context.times.attempt_token_at_s) / (output - 1)
        self.trials.record_attempt(
            context.request.deployment,
            route,
            failed=context.outcome is OUTCOME_FAILED,
            ttft_ms=context.times.attempt_ttft_ms,
            itl_ms=itl_ms,
        )

    def _add_demand(self, context: RequestContext, prompt: int, cached: int, output: int) -> None:
        """Add an ended request to its deployment's demand."""
        if context.is_declined:
            # The content was refused: another replica would not have helped.
            return
        demand = self._demand_of(context)
        if not context.found_no_replica:
            # A refused request is demand as well: count its estimated prompt.
            demand.add_request(prompt or context.prompt_tokens_estimate, cached)
        demand.output += output
        demand.refused += context.outcome is OUTCOME_REFUSED

    def _demand_of(self, context: RequestContext) -> _DemandCounts:
        deployment_id = context.request.deployment_id
        demand = self._demand.get(deployment_id)
        if demand is None:
            demand = self._demand[deployment_id] = _DemandCounts()
        return demand
