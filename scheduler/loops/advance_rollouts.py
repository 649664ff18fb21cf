"""Takes each rollout its next step, or back, by what routers have seen of it."""

import logging
from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.decide.rollout import Rollout, Verdict, after, judge
from scheduler.store.events import record_event
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import transaction
from scheduler.store.rollouts import active_rollouts, read_starts, read_strata, write_rollout

log = logging.getLogger(__name__)


class RolloutCounts(NamedTuple):
    """One turn's counts: rollouts on their way, and those that changed."""

    on_their_way: int = 0
    changed: int = 0


class AdvanceRollouts:
    """A turn reads, judges and writes one event a rollout; whoever acts next reads it again."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> RolloutCounts:
        """Judge every rollout on its way."""
        acting = self._acting
        if not acting.is_acting:
            return RolloutCounts()
        changed = 0
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            judged = [
                (
                    rollout,
                    judge(
                        rollout,
                        await read_strata(connection, rollout),
                        await read_starts(connection, rollout),
                    ),
                )
                for rollout in await active_rollouts(connection)
            ]
        for rollout, verdict in judged:
            if verdict is not None and await self._write(rollout, verdict):
                changed += 1
        if changed:
            acting.nudge_place()
            acting.publish()
        return RolloutCounts(len(judged), changed)

    async def _write(self, rollout: Rollout, verdict: Verdict) -> bool:
        new = after(rollout, verdict.event, verdict.reason)
        async with transaction(self._acting.pool) as connection:
            await assert_epoch(connection, self._acting.epoch)
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
