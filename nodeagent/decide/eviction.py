"""Chooses which artifacts to delete for a new one: the least recently used without a pin."""

from collections.abc import Collection, Sequence

import msgspec


class CachedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """A complete artifact on this node's disk. `used_at` is Unix time."""

    digest: str
    size_bytes: int
    used_at: float


def evict(
    cached: Sequence[CachedArtifact],
    pinned: Collection[str],
    *,
    budget_bytes: int,
    needed_bytes: int,
) -> tuple[str, ...] | None:
    """Return the digests to delete so that `needed_bytes` more fit the budget.

    Return None if deleting everything that is not `pinned` would not be enough.
    """
    used_bytes = sum(artifact.size_bytes for artifact in cached)
    evicted = []
    for artifact in sorted(cached, key=lambda artifact: (artifact.used_at, artifact.digest)):
        if used_bytes + needed_bytes <= budget_bytes:
            break
        if artifact.digest not in pinned:
            evicted.append(artifact.digest)
            used_bytes -= artifact.size_bytes
    return tuple(evicted) if used_bytes + needed_bytes <= budget_bytes else None
