"""Sharing: the other processes of this router are told which prompts were read where."""

from router.processes import ParentLink, WorkerPool
from router.prompt_sharing import PromptOutbox, SharedPrompts


class PromptSharer:
    """Empties the outbox: a worker tells the main process, which passes it on; that one, all."""

    def __init__(
        self, outbox: PromptOutbox, parent: ParentLink | None, workers: WorkerPool
    ) -> None:
        """A worker has a `parent`, the main process has `workers`."""
        self._outbox = outbox
        self._parent = parent
        self._workers = workers

    async def run_once(self) -> int:
        """Tell what was read since the last turn; return how many prompts."""
        rows = self._outbox.take()
        if self._parent is not None:
            # Also where there are none: a worker that says nothing is taken to hang.
            await self._parent.send(SharedPrompts(rows))
        elif rows:
            self._workers.tell(SharedPrompts(rows))
        return len(rows)
