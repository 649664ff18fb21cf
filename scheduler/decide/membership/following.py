"""Finds routers that do not serve the published routes, and nodes that lack their assignment."""

from collections import deque
from typing import Final, NamedTuple

from isochrone.wire.ids import Generation, NodeId

BEHIND_S: Final = 30.0
"""A router that does not serve a table this long after it was published does not follow. Routers
report the table that they serve every few seconds, with their demand."""

PUBLICATIONS_KEPT: Final = 1024
REASON_CHARS_MAX: Final = 300


ASSIGNMENT_BEHIND_S: Final = 30.0
"""A node that has not stored an assignment this long after it was sent does not follow. Nodes
report every two seconds which one they have."""


class _RouterRecord:
    __slots__ = ("generation", "last_error", "refusal", "reports", "unsendable")

    def __init__(self) -> None:
        self.generation = Generation(0)
        self.reports = False
        self.refusal = ""
        self.unsendable = ""
        self.last_error = ""


class RouteFollowing:
    """The route table that each router reports to serve. The record outlives connections."""

    def __init__(self) -> None:
        self._routers: dict[str, _RouterRecord] = {}
        self._published: deque[tuple[float, Generation]] = deque(maxlen=PUBLICATIONS_KEPT)

    def clear(self) -> None:
        """Forget everything: a new term begins."""
        self._routers.clear()
        self._published.clear()

    def record_published(self, generation: Generation, now: float) -> None:
        """Note that a table was published."""
        self._published.append((now, generation))

    def record_registered(
        self, router: str, generation: Generation, *, reports: bool, last_error: str
    ) -> None:
        """Note a new connection. A router that `reports` says later which table it serves."""
        record = self._record(router)
        record.generation, record.reports = generation, reports
        record.last_error = last_error[:REASON_CHARS_MAX]
        record.refusal = record.unsendable = ""

    def record_served(self, router: str, generation: Generation, refusal: str) -> None:
        """Note which table a router serves, and why it does not serve a newer one."""
        record = self._record(router)
        record.generation, record.refusal = generation, refusal[:REASON_CHARS_MAX]

    def record_unsendable(self, router: str, reason: str) -> bool:
        """Note why a router cannot be sent the table; return whether that is new."""
        record = self._record(router)
        is_new = not record.unsendable
        record.unsendable = reason[:REASON_CHARS_MAX]
        return is_new

    def record_sendable(self, router: str) -> None:
        """Note that a router was sent the table."""
        self._record(router).unsendable = ""

    def behind(self, now: float) -> dict[str, str]:
        """Return the routers that do not follow, each with the reason in words."""
        overdue = self._overdue_generation(now)
        return {
            router: self._reason(record, overdue)
            for router, record in sorted(self._routers.items())
            if record.unsendable or (record.reports and record.generation < overdue)
        }

    def _record(self, router: str) -> _RouterRecord:
        return self._routers.setdefault(router, _RouterRecord())

    def _overdue_generation(self, now: float) -> Generation:
        """Return the newest generation that every router should serve by now."""
        overdue = [
            generation
            for published_at, generation in self._published
            if published_at <= now - BEHIND_S
        ]
        return overdue[-1] if overdue else Generation(0)

    @staticmethod
    def _reason(record: _RouterRecord, overdue: Generation) -> str:
        reason = record.unsendable or record.refusal
        if not reason and record.last_error:
            reason = f"its last connection ended: {record.last_error}"
        behind = f"it serves generation {record.generation}, at least {overdue} is due"
        return f"{behind}: {reason or 'it has not said why'}"


class _SentAssignment(NamedTuple):
    at: float
    generation: Generation


class _NodeRecord:
    __slots__ = ("newest", "oldest", "refusal", "stored")

    def __init__(self, sent: _SentAssignment) -> None:
        self.oldest: _SentAssignment | None = sent
        """The first assignment sent that is newer than the one that the node has."""
        self.newest = sent
        self.stored = Generation(0)
        self.refusal = ""


class AssignmentFollowing:
    """Which assignment each node was sent, and which one it has stored."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _NodeRecord] = {}

    def clear(self) -> None:
        """Forget everything: nodes follow another scheduler."""
        self._nodes.clear()

    def forget(self, node_id: NodeId) -> None:
        """Forget a node that is gone."""
        self._nodes.pop(node_id, None)

    def record_sent(self, node_id: NodeId, generation: Generation, now: float) -> None:
        """Note that a node was sent an assignment."""
        sent = _SentAssignment(now, generation)
        record = self._nodes.get(node_id)
        if record is None:
            self._nodes[node_id] = _NodeRecord(sent)
            return
        record.newest = sent
        if record.oldest is None and generation > record.stored:
            record.oldest = sent

    def record_stored(self, node_id: NodeId, generation: Generation, refusal: str) -> None:
        """Note which assignment a node has, and why it has not taken a newer one."""
        record = self._nodes.get(node_id)
        if record is None:
            return
        record.stored, record.refusal = generation, refusal[:REASON_CHARS_MAX]
        if record.oldest is not None and generation >= record.oldest.generation:
            record.oldest = record.newest if record.newest.generation > generation else None

    def behind(self, now: float) -> dict[NodeId, str]:
        """Return the nodes that do not follow, each with the reason in words."""
        return {
            node_id: f"it has assignment {record.stored}, at least {record.oldest.generation} is "
            f"due: {record.refusal or 'it has not said why'}"
            for node_id, record in sorted(self._nodes.items())
            if record.oldest is not None and now - record.oldest.at >= ASSIGNMENT_BEHIND_S
        }
