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
from router.metrics import Metrics
from router.request_context import OUTCOME_FAILED, OUTCOME_REFUSED, RequestContext
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

    def record(self, context: RequestContext, now_s: float) -> None:
        """Book one request that ended now."""
        request = context.request
        usage = context.usage()
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
        metrics = self._metrics.deployments[request.deployment.name]
        metrics.outcomes[DECLINED if context.is_declined else context.outcome] += 1
        metrics.prompt += prompt
        metrics.cached += cached
        metrics.output += output
        first_s = context.times.first_token_at_s
        if first_s is not None and context.attempt is not None:
            metrics.ttft.observe(first_s - request.arrived_s)
            metrics.ttft_error.observe(
                (context.times.attempt_ttft_ms - context.attempt.ranked.ttft_ms) / 1000
            )
        self._add_demand(context, prompt, cached, output)
        route = context.route
        if route is None:
            return
        if request.deployment.rollout is not None and context.has_uncounted_attempt:
            self._add_trial(context, route, output, now_s)
        if len(self._usage) >= USAGE_ROWS_MAX:
            self._metrics.usage_dropped.inc()
            return
        row = UsageRow(
            request_id=request.request_id,
            key_id=request.key.key_id,
            tenant_id=request.key.tenant_id,
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
        self.journal.append(row)

    def found_no_replica(self, context: RequestContext) -> None:
        """Count who waits for a first replica while he waits: it is what wakes one."""
        asked = self._demand_of(context)
        asked.no_replica += 1
        asked.count(context.prompt_tokens_estimate, 0)
        if asked.no_replica == 1 and context.request.deployment_id not in self._unserved_before:
            self.on_unserved()

    def attempt_failed(self, context: RequestContext) -> None:
        """Count a replica that failed under a request, whoever answers in the end."""
        if context.route is not None:
            self.trials.ended(context.request.deployment, context.route, failed=True)

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

    def _add_trial(self, context: RequestContext, route: Route, output: int, now_s: float) -> None:
        output -= context.times.tokens_before
        itl_ms = 0.0
        if context.times.attempt_token_at_s and output > 1:
            itl_ms = 1000 * (now_s - context.times.attempt_token_at_s) / (output - 1)
        self.trials.ended(
            context.request.deployment,
            route,
            failed=context.outcome is OUTCOME_FAILED,
            ttft_ms=context.times.attempt_ttft_ms,
            itl_ms=itl_ms,
        )

    def _add_demand(self, context: RequestContext, prompt: int, cached: int, output: int) -> None:
        if context.is_declined:
            # For what its client wrote: no replica more would have helped.
            return
        asked = self._demand_of(context)
        if not context.found_no_replica:
            # What was turned away wanted its prompt done too: the planner must see it.
            asked.count(prompt or context.prompt_tokens_estimate, cached)
        asked.output += output
        asked.refused += context.outcome is OUTCOME_REFUSED

    def _demand_of(self, context: RequestContext) -> _DemandCounts:
        deployment_id = context.request.deployment_id
        asked = self._demand.get(deployment_id)
        if asked is None:
            asked = self._demand[deployment_id] = _DemandCounts()
        return asked
