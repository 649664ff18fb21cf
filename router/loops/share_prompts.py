"""Share with the other processes of this router which prompts were read where, and suspicions."""

from router.processes import ParentLink, WorkerPool
from router.prompt_sharing import PromptOutbox, SharedPrompts
from router.suspicion_sharing import SuspicionOutbox


class PromptSharer:
    """Sends the outboxes: a worker to the main process, which forwards it; the main process to all
    workers.
    """

    def __init__(
        self,
        outbox: PromptOutbox,
        suspicions: SuspicionOutbox,
        parent: ParentLink | None,
        workers: WorkerPool,
    ) -> None:
        """A worker process has a `parent`; the main process has `workers`."""
        self._outbox = outbox
        self._suspicions = suspicions
        self._parent = parent
        self._workers = workers

    async def run_once(self) -> int:
        """Send the prompts since the last turn; return how many."""
        rows, suspicions = self._outbox.take(), self._suspicions.take()
        if self._parent is not None:
            if suspicions is not None:
                await self._parent.send(suspicions)
            # Sent even if empty: the main process replaces a worker that sends nothing.
            await self._parent.send(SharedPrompts(rows))
        else:
            if suspicions is not None:
                self._workers.broadcast(suspicions)
            if rows:
                self._workers.broadcast(SharedPrompts(rows))
        return len(rows)
