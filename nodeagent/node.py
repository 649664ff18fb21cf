"""The state of this node in the agent's memory: its identity, its assignment and its devices."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from isochrone.service.network.control_link import Progress
from isochrone.service.trust.identity import Identity
from isochrone.wire.ids import BootId, DeviceId, Epoch, Generation, NodeId
from isochrone.wire.peers.assignment import (
    ArtifactPrefetch,
    Assignment,
    PeerSource,
    RevokedCertificate,
    StoreMasterPlace,
)
from isochrone.wire.peers.control import Welcome
from isochrone.wire.peers.report import NodeDevice, Refusal
from nodeagent import metrics
from nodeagent.decide.replicas.reconcile import assignment_problem
from nodeagent.host.assignment_file import AssignmentFile
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.devices import DeviceReader

log = logging.getLogger(__name__)

LACKING_CHARACTERS: Final = 300
"""A scheduler refuses a report with longer reasons than it expects."""


class NodeState:
    """Holds the current assignment, which is also stored in the assignment file."""

    def __init__(
        self,
        identity: Identity,
        boot_id: BootId,
        file: AssignmentFile,
        devices: DeviceReader,
        cache_salts: CacheSalts,
    ) -> None:
        self.identity = identity
        self.node_id = NodeId(identity.name)
        self.boot_id = boot_id
        self.assignment: Assignment | None = None
        self.refusals: tuple[Refusal, ...] = ()
        self.lacking_engines: dict[str, str] = {}
        """By driver, why this node can start no such engine."""
        self.assignment_refusal = ""
        """Why the last assignment was refused; empty after one is taken."""
        # Nudges of the periodic jobs; the application sets them once the jobs exist.
        self.nudge_converge: Callable[[], None] = lambda: None
        self.nudge_report: Callable[[], None] = lambda: None
        self.nudge_prefetch: Callable[[], None] = lambda: None
        self.nudge_store: Callable[[], None] = lambda: None
        self._file = file
        self.devices = devices
        self.cache_salts = cache_salts
        self.relay_token = ""
        """The token with which this node fetches files that clients have uploaded, while it is
        connected."""
        self._unsaved: Assignment | None = None
        """The newest assignment, while the disk refuses to store it."""
        self._accept_lock = asyncio.Lock()

    def note_missing(self, missing: Mapping[str, str]) -> None:
        """Report what the engines lack, given by driver: "" for one that can start."""
        lacking = {name: reason[:LACKING_CHARACTERS] for name, reason in missing.items() if reason}
        if lacking != self.lacking_engines:
            self.lacking_engines = lacking
            self.nudge_report()

    def progress(self) -> Progress:
        """Return the generation and epoch of the stored assignment."""
        if self.assignment is None:
            return Progress(self.identity.cluster_id, Generation(0), Epoch(0))
        current = self.assignment
        return Progress(current.cluster_id, current.generation, current.epoch)

    async def restore(self) -> None:
        """Load the stored assignment, so that the node works without a scheduler."""
        stored = await asyncio.to_thread(self._file.read)
        cluster_id = self.identity.cluster_id
        if stored is not None and not assignment_problem(stored, None, self.node_id, cluster_id):
            self.assignment = stored
            metrics.GENERATION.set(stored.generation)

    async def on_welcome(self, welcome: Welcome) -> None:
        """Send a full report at the start of each connection to a scheduler.

        Also take the secret of the cache salts from it.
        """
        self.nudge_report()
        self.relay_token = welcome.relay_token
        await self.cache_salts.take(welcome.cache_salt)

    async def on_message(self, message: object) -> None:
        """Accept an assignment from the scheduler, or log why it is refused."""
        if isinstance(message, Assignment) and (reason := await self.accept(message)):
            log.warning("assignment refused", extra={"fields": {"reason": reason}})

    async def accept(self, offered: Assignment) -> str:
        """Store a newer assignment on disk, then make it current; return why not, or ""."""
        async with self._accept_lock:
            newest = self._unsaved or self.assignment
            reason = assignment_problem(offered, newest, self.node_id, self.identity.cluster_id)
            if reason:
                metrics.ASSIGNMENTS_REFUSED.inc()
                self.assignment_refusal = reason
                return reason
            if offered != self.assignment:
                try:
                    await asyncio.to_thread(self._file.write, offered)
                except OSError as error:
                    self._unsaved = offered
                    self.assignment_refusal = (
                        f"cannot store generation {offered.generation} on disk: {error.strerror}; "
                        "the previous generation stays in effect until the disk accepts it"
                    )
                    return self.assignment_refusal
                self.assignment = offered
                self._unsaved = None
                metrics.GENERATION.set(offered.generation)
            self.assignment_refusal = ""
        self.nudge_store()
        self.nudge_converge()
        self.nudge_prefetch()
        return ""

    async def retry_unsaved(self) -> None:
        """Try again to store an assignment that the disk refused; it is not sent a second time."""
        if self._unsaved is not None:
            await self.accept(self._unsaved)

    def holders_of(self, digest: str) -> Sequence[PeerSource]:
        """Return the nodes that hold an artifact, as the scheduler names them, nearest first."""
        holders = self.assignment.holders if self.assignment is not None else ()
        return next((entry.peers for entry in holders if entry.digest == digest), ())

    def prefetches(self) -> Sequence[ArtifactPrefetch]:
        """Return the artifacts to fetch ahead of use, in the order of their need."""
        return self.assignment.prefetches if self.assignment is not None else ()

    def store_master(self) -> StoreMasterPlace | None:
        """Return where the master of the PoP's store of KV runs; None if the PoP has none."""
        return self.assignment.store_master if self.assignment is not None else None

    def revoked_certificates(self) -> Sequence[RevokedCertificate]:
        """Return the client certificates that this node's data-plane server refuses."""
        return self.assignment.revoked if self.assignment is not None else ()

    async def read_devices(self) -> Sequence[NodeDevice]:
        """Return the current devices of this machine."""
        return await asyncio.to_thread(self.devices.read)

    async def device_budgets(self) -> Mapping[DeviceId, int]:
        """Return the bytes of each device that replicas may take."""
        return {device.device_id: device.memory_bytes for device in await self.read_devices()}
