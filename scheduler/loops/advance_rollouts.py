"""Moves each active rollout a step forward or back, by what routers have measured of it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.decide.rollout import Rollout, RolloutVerdict, apply_event, judge_rollout
from scheduler.state.lease_state import LeaseState
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.events import record_event
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Pool, transaction
from scheduler.store.rollouts import active_rollouts, read_starts, read_strata, write_rollout

log = logging.getLogger(__name__)


class RolloutCounts(NamedTuple):
    """How many rollouts are active, and how many of them one turn changed."""

    active: int = 0
    changed: int = 0


@dataclass(eq=False, kw_only=True)
class AdvanceRollouts:
    """A rollout's whole state is its row, so any scheduler that acts later continues from it."""

    pool: Pool
    lease: LeaseState
    routes: PublishedRoutes
    nudge_place: Callable[[], None]

    async def run_once(self) -> RolloutCounts:
        """Judge every active rollout; store each change with one event."""
        if not self.lease.is_acting:
            return RolloutCounts()
        changed = 0
        async with transaction(self.pool, isolation="repeatable_read") as connection:
            judged = [
                (
                    rollout,
                    judge_rollout(
                        rollout,
                        await read_strata(connection, rollout),
                        await read_starts(connection, rollout),
                        self.lease.acting_for_s,
                    ),
                )
                for rollout in await active_rollouts(connection)
            ]
        for rollout, verdict in judged:
            if verdict is not None and await self._write(rollout, verdict):
                changed += 1
        if changed:
            self.nudge_place()
            self.routes.mark_changed()
        return RolloutCounts(len(judged), changed)

    async def _write(self, rollout: Rollout, verdict: RolloutVerdict) -> bool:
        new = apply_event(rollout, verdict.event, verdict.reason)
        async with transaction(self.pool) as connection:
            await assert_epoch(connection, self.lease.epoch)
            if not await write_rollout(connection, rollout, new):
                return False
            await record_event(
                connection,
                actor="scheduler",
                kind=f"rollout.{verdict.event.value}",
                subject=rollout.deployment_id,
                reason=f"version {rollout.to_version}, step {rollout.step}: {verdict.reason}"[:500],
            )
        fields = {"rollout": rollout.rollout_id, "state": new.state, "reason": verdict.reason}
        log.info("rollout", extra={"fields": {**fields, "step": new.step}})
        return True
