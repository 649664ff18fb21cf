"""Deletes the files of LoRA adapters that no request has used for a while.

No router names a deleted adapter any more, so every node deletes its files after that time. The
files of another adapter are fetched again with its next request, even if the engine has it loaded:
every request first fetches the missing files.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.supervisor import Supervisor


@dataclass(eq=False)
class DeleteIdleAdapters:
    """Deletes idle files, except those that a request uses now or that are a replica's model.

    Files are idle that were not used for `idle_s`; none are if that is 0.
    """

    supervisor: Supervisor
    artifacts: ArtifactStore
    idle_s: float
    unix_clock: Callable[[], float]

    async def run_once(self) -> int:
        """Delete the files of each idle adapter; return how many adapters these were."""
        if not self.idle_s:
            return 0
        replicas = self.supervisor.replicas.values()
        in_use = {replica.spec.artifact.digest for replica in replicas}
        for replica in replicas:
            in_use.update(replica.adapters.requested)
        used_before = self.unix_clock() - self.idle_s
        return await self.artifacts.delete_idle_adapters(in_use, used_before)
