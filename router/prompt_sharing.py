"""What the processes of one router tell one another: which prompts were read where.

A client's next request may come to any of them. Each keeps an index of its own, and takes what
another sent into it as if it had gone from there. Only what was answered is told, a second late at
most, and no more than PROMPTS_MAX a turn, the newest: past that the index is a sample.
"""

from collections import deque
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, ReplicaId
from router.decide.prefix_index import PrefixKeys, SentPrompt

OUTBOX_PROMPTS_MAX: Final = 256


class SharedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt that a replica has read."""

    deployment_id: DeploymentId
    replica_id: ReplicaId
    prefix_keys: PrefixKeys


class SharedPrompts(msgspec.Struct, frozen=True, tag="prompts"):
    """What one process has to tell the others."""

    rows: tuple[SharedPrompt, ...]


class PromptOutbox:
    """Prompts not told yet; the oldest give way."""

    def __init__(self) -> None:
        """Hold nothing, and take nothing before `is_open`."""
        self.is_open = False
        self._rows: deque[SharedPrompt] = deque(maxlen=OUTBOX_PROMPTS_MAX)

    def add(
        self, deployment_id: DeploymentId, replica_id: ReplicaId, sent: SentPrompt, keys: PrefixKeys
    ) -> None:
        """A prompt was answered: keep it where anything of it was new there."""
        if self.is_open and keys.keys and round(sent.share * keys.size) < keys.ends[-1]:
            self._rows.append(SharedPrompt(deployment_id, replica_id, keys))

    def take(self) -> tuple[SharedPrompt, ...]:
        """Hand over what there is."""
        rows = tuple(self._rows)
        self._rows.clear()
        return rows
