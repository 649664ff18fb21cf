"""Which artifacts to drop when the disk fills: the least lately used that nothing needs."""

from collections.abc import Collection, Sequence

import msgspec


class CachedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact on disk."""

    digest: str
    size_bytes: int
    used_at: float


def evict(
    kept: Sequence[CachedArtifact], pinned: Collection[str], *, budget_bytes: int, needed_bytes: int
) -> tuple[str, ...] | None:
    """Return the digests to drop so that `needed_bytes` more fit, or None where they cannot."""
    held = sum(artifact.size_bytes for artifact in kept)
    dropped = []
    for artifact in sorted(kept, key=lambda artifact: (artifact.used_at, artifact.digest)):
        if held + needed_bytes <= budget_bytes:
            break
        if artifact.digest not in pinned:
            dropped.append(artifact.digest)
            held -= artifact.size_bytes
    return tuple(dropped) if held + needed_bytes <= budget_bytes else None
