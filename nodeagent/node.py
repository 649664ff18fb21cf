"""What the agent holds in memory of its own node: who it is, its assignment, its devices."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from isochrone.service.control_link import Progress
from isochrone.service.identity import Identity
from isochrone.wire.assignment import Assignment, PeerSource, Prefetch, Revoked
from isochrone.wire.control import Welcome
from isochrone.wire.ids import BootId, Epoch, Generation, NodeId
from isochrone.wire.report import Device, Refusal
from nodeagent import metrics
from nodeagent.decide.reconcile import refusal_of
from nodeagent.host.devices import Devices
from nodeagent.host.ledger import Ledger

log = logging.getLogger(__name__)


class Node:
    """The node's own state. The ledger is its copy on disk."""

    def __init__(
        self, identity: Identity, boot_id: BootId, ledger: Ledger, devices: Devices
    ) -> None:
        self.identity = identity
        self.node_id = NodeId(identity.name)
        self.boot_id = boot_id
        self.assignment: Assignment | None = None
        self.refusals: tuple[Refusal, ...] = ()
        # The duties that look again, once the house is put together.
        self.nudge_converge: Callable[[], None] = lambda: None
        self.nudge_report: Callable[[], None] = lambda: None
        self.nudge_prefetch: Callable[[], None] = lambda: None
        self._ledger = ledger
        self._devices = devices
        self._unkept: Assignment | None = None
        self._taking = asyncio.Lock()

    def progress(self) -> Progress:
        """Return the newest that this node has stored."""
        if self.assignment is None:
            return Progress(self.identity.cluster_id, Generation(0), Epoch(0))
        held = self.assignment
        return Progress(held.cluster_id, held.generation, held.epoch)

    async def restore(self) -> None:
        """Read the ledger: what ran before runs again, whoever is away."""
        held = await asyncio.to_thread(self._ledger.read)
        cluster_id = self.identity.cluster_id
        if held is not None and not refusal_of(held, None, self.node_id, cluster_id):
            self.assignment = held
            metrics.GENERATION.set(held.generation)

    async def welcomed(self, welcome: Welcome) -> None:
        """A new conversation begins with the whole truth."""
        self.nudge_report()

    async def told(self, message: object) -> None:
        """Take an assignment, or say why not."""
        if isinstance(message, Assignment) and (reason := await self.take(message)):
            log.warning("assignment not taken", extra={"fields": {"reason": reason}})

    async def take(self, offered: Assignment) -> str:
        """Keep a newer assignment, on disk before in effect; return why not, if not."""
        async with self._taking:
            newest = self._unkept or self.assignment
            reason = refusal_of(offered, newest, self.node_id, self.identity.cluster_id)
            if reason:
                metrics.ASSIGNMENTS_REFUSED.inc()
                return reason
            if offered != self.assignment:
                try:
                    await asyncio.to_thread(self._ledger.write, offered)
                except OSError as error:
                    self._unkept = offered
                    return (
                        f"cannot keep generation {offered.generation} on disk: {error.strerror}; "
                        "going on with the one before until the disk takes it"
                    )
                self.assignment = offered
                self._unkept = None
                metrics.GENERATION.set(offered.generation)
        self.nudge_converge()
        self.nudge_prefetch()
        return ""

    async def take_unkept(self) -> None:
        """Take an assignment that the disk did not; nobody would send it again."""
        if self._unkept is not None:
            await self.take(self._unkept)

    def holders_of(self, digest: str) -> Sequence[PeerSource]:
        """Return the nodes that the scheduler names for an artifact, the nearest first."""
        held = self.assignment.holders if self.assignment is not None else ()
        return next((named.peers for named in held if named.digest == digest), ())

    def prefetches(self) -> Sequence[Prefetch]:
        """Return the weights that this node should have before it runs them, in their order."""
        return self.assignment.prefetches if self.assignment is not None else ()

    def revoked(self) -> Sequence[Revoked]:
        """Return whose certificates this node's door refuses."""
        return self.assignment.revoked if self.assignment is not None else ()

    async def read_devices(self) -> Sequence[Device]:
        """Return the devices as they are now."""
        return await asyncio.to_thread(self._devices.read)
