"""Share with the other processes of this router which prompts were read where."""

from router.processes import ParentLink, WorkerPool
from router.prompt_sharing import PromptOutbox, SharedPrompts


class PromptSharer:
    """Sends the outbox: a worker to the main process, which forwards it; the main process to all
    workers.
    """

    def __init__(
        self, outbox: PromptOutbox, parent: ParentLink | None, workers: WorkerPool
    ) -> None:
        """A worker process has a `parent`; the main process has `workers`."""
        self._outbox = outbox
        self._parent = parent
        self._workers = workers

    async def run_once(self) -> int:
        """Send the prompts since the last turn; return how many."""
        rows = self._outbox.take()
        if self._parent is not None:
            # Sent even if empty: the main process replaces a worker that sends nothing.
            await self._parent.send(SharedPrompts(rows))
        elif rows:
            self._workers.broadcast(SharedPrompts(rows))
        return len(rows)
