"""Empties the outboxes of what processes share: prompts, suspicions, and the use of keys.

Prompts go to the other processes of this router, suspicions to all other routers, too, and the use
of keys only to those.
"""

from collections.abc import Callable
from dataclasses import dataclass

from isochrone.wire.client_keys.key_use import KeyUse
from router.processes import ParentLink, Send, WorkerPool
from router.sharing.key_use_sharing import KeyUseOutbox, OwnKeyUse
from router.sharing.prompt_sharing import PromptOutbox, SharedPrompts
from router.sharing.suspicion_sharing import SuspicionOutbox, to_fleet


@dataclass(eq=False, kw_only=True)
class OutboxSharer:
    """Sends the outboxes: a worker to the main process, which forwards it; the main process to all
    workers.

    A worker process has a `parent`; the main process has `workers`. The main process sends
    `fleet_suspicions` and `key_use` to the scheduler with `send`, a worker `key_use` to the main
    process. `take_key_use` returns what this process has to add to it. `clock` returns monotonic
    seconds.
    """

    prompts: PromptOutbox
    suspicions: SuspicionOutbox
    parent: ParentLink | None
    workers: WorkerPool
    fleet_suspicions: SuspicionOutbox
    send: Send
    clock: Callable[[], float]
    take_key_use: Callable[[], list[KeyUse]]
    key_use: KeyUseOutbox

    async def run_once(self) -> int:
        """Send the prompts since the last turn; return how many."""
        rows, suspicions = self.prompts.take(), self.suspicions.take()
        self.key_use.add(self.take_key_use())
        if self.parent is not None:
            use = self.key_use.take()
            if use is not None and not await self.parent.send(OwnKeyUse(use.rows)):
                self.key_use.add(use.rows)
            if suspicions is not None:
                await self.parent.send(suspicions)
            # Sent even if empty: the main process replaces a worker that sends nothing.
            await self.parent.send(SharedPrompts(rows))
        else:
            if suspicions is not None:
                self.workers.broadcast(suspicions)
                self.fleet_suspicions.add(suspicions)
            if rows:
                self.workers.broadcast(SharedPrompts(rows))
            await self._tell_fleet()
        return len(rows)

    async def _tell_fleet(self) -> None:
        """Send the suspicions and the use of keys that the other routers do not know yet; keep them
        while no scheduler is connected."""
        suspicions = self.fleet_suspicions.take()
        if suspicions is not None and not await self.send(to_fleet(suspicions, self.clock())):
            self.fleet_suspicions.add(suspicions)
        use = self.key_use.take()
        if use is not None and not await self.send(use):
            self.key_use.add(use.rows)
