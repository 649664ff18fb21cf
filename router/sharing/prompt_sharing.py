"""Shares, between the processes of one router, which replica read which prompts.

A client's next request may reach any of the processes. Each keeps its own prefix index, and adds
the prompts that the others sent as if it had sent them itself. Only answered prompts are shared,
once a second, and at most OUTBOX_PROMPTS_MAX a turn, the newest ones: beyond that the index is a
sample.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, ReplicaId
from router.decide.caches.prefix_index import PrefixKeys, SentPrompt

OUTBOX_PROMPTS_MAX: Final = 256


class SharedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt that a replica has read. `keys`, `ends` and `size` are its prefix keys."""

    deployment_id: DeploymentId
    replica_id: ReplicaId
    keys: Sequence[int]
    ends: Sequence[int]
    size: int

    @property
    def prefix_keys(self) -> PrefixKeys:
        """Return the prefix keys of the prompt."""
        return PrefixKeys(self.keys, self.ends, self.size)


class SharedPrompts(msgspec.Struct, frozen=True, tag="prompts"):
    """The prompts that one process shares in one turn."""

    rows: tuple[SharedPrompt, ...]


class PromptOutbox:
    """Prompts not shared yet. When full, the oldest are dropped."""

    def __init__(self) -> None:
        """Start empty, and take nothing until `is_open` is set."""
        self.is_open = False
        self._rows: deque[SharedPrompt] = deque(maxlen=OUTBOX_PROMPTS_MAX)

    def add(
        self, deployment_id: DeploymentId, replica_id: ReplicaId, sent: SentPrompt, keys: PrefixKeys
    ) -> None:
        """Add an answered prompt, unless the replica had all of it cached before."""
        if self.is_open and keys.keys and round(sent.share * keys.size) < keys.ends[-1]:
            shared = list(keys.keys)
            self._rows.append(SharedPrompt(deployment_id, replica_id, shared, keys.ends, keys.size))

    def take(self) -> tuple[SharedPrompt, ...]:
        """Return the prompts and empty the outbox."""
        rows = tuple(self._rows)
        self._rows.clear()
        return rows
