"""CORRIDOR: have it decided what should be, and commit it if nothing moved meanwhile.

The planner reads what is and decides (`planner/desk.py`), in a process of its own.
"""

import logging
import secrets
from typing import NamedTuple

import msgspec

from isochrone.service.identity import Authority
from scheduler import metrics
from scheduler.acting import Acting
from scheduler.decide.claims import claim
from scheduler.decide.cluster import Plan, Start
from scheduler.decide.group import with_secret
from scheduler.store.nodes import read_node_ids
from scheduler.store.plans import commit_plan
from scheduler.store.pool import transaction, using

log = logging.getLogger(__name__)


class PlacementCounts(NamedTuple):
    """One turn's outcome."""

    started: int = 0
    ended: int = 0
    unmet: int = 0
    committed: bool = False
    frozen: str = ""


class PlaceReplicas:
    """The scheduler's main duty."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> PlacementCounts:
        """Have planned, commit, tell."""
        acting = self._acting
        if not acting.is_acting:
            return PlacementCounts()
        if await self._must_hear_first():
            return PlacementCounts(frozen="waiting for every node's first report")
        decided = await acting.planner.plan(acting.heard())
        self._note(decided)
        if not decided.starts and not decided.endings:
            return PlacementCounts(unmet=len(decided.unmet), frozen=decided.frozen)
        named = (with_secret(start, secrets.token_hex(16)) for start in decided.starts)
        starts = tuple(_sealed(start, acting.authority) for start in named)
        decided = msgspec.structs.replace(decided, starts=starts)
        with acting.owing(decided.node_ids):
            async with transaction(acting.pool) as connection:
                committed = await commit_plan(connection, decided, acting.epoch)
            if committed:
                await self._tell(decided)
        if not committed:
            acting.nudge_place()
        return PlacementCounts(
            len(decided.starts), len(decided.endings), len(decided.unmet), committed=committed
        )

    async def _must_hear_first(self) -> bool:
        """A new term adopts what nodes report before it decides; for `hear_first_s` at most."""
        if self._acting.acting_for_s >= self._acting.config.hear_first_s:
            return False
        async with using(self._acting.pool) as connection:
            node_ids = await read_node_ids(connection)
        heard = {peer.name for peer in self._acting.agents() if peer.has_reported}
        return not heard.issuperset(node_ids)

    def _note(self, decided: Plan) -> None:
        if decided.frozen != self._acting.frozen:
            log.warning("placement freeze", extra={"fields": {"reason": decided.frozen or "over"}})
        self._acting.frozen = decided.frozen
        self._acting.unmet = tuple((u.deployment_id, u.reason) for u in decided.unmet)
        metrics.GENERATION.set(decided.based_on)
        metrics.FROZEN.set(bool(decided.frozen))
        metrics.UNMET.set(len(decided.unmet))

    async def _tell(self, decided: Plan) -> None:
        metrics.MOVES.labels("start").inc(len(decided.starts))
        metrics.MOVES.labels("end").inc(len(decided.endings))
        for start in decided.starts:
            replica_id = start.spec.replica_id
            fields = {"replica": replica_id, "node": start.node_id, "reason": start.reason}
            log.info("placed", extra={"fields": fields})
        await self._acting.tell_assignments(decided.node_ids)
        self._acting.publish()


def _sealed(start: Start, authority: Authority) -> Start:
    """Return a start each part of which its node can prove to have been given."""
    return start.each(
        lambda part: part.with_spec(seal=authority.seal(claim(part.node_id, part.spec)))
    )
