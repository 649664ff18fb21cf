"""Decides whether a node report differs from the one that the store holds.

Most reports do not: ten seconds later a node is the same. Small drifts of times and rates do not
count, because no decision depends on them. Every value that a plan, a route or an operator reads
counts.
"""

from operator import attrgetter
from typing import Final

from isochrone.wire.peers.report import ReplicaProfile, ReplicaReport, ReplicaState, Report

RATE_STEP: Final = 0.1
"""A rate has changed if it moved by more than this share."""

DISK_STEP_BYTES: Final = 8 * 1024**3

_node_fields: Final = attrgetter(
    *("boot_id", "generation", "address", "version", "refusals", "devices"),
    *("artifacts", "in_host_memory", "failure_domain", "lacking_engines"),
)
_replica_fields: Final = attrgetter("spec", "state", "reason", "restarts")


def has_changed(written: Report, new: Report) -> bool:
    """Return whether a report differs from the one that was written last."""
    return (
        _node_fields(new) != _node_fields(written)
        or abs(new.disk_free_bytes - written.disk_free_bytes) > DISK_STEP_BYTES
        or rate_moved(written.disk_bytes_per_s, new.disk_bytes_per_s)
        or rate_moved(written.fetch_bytes_per_s, new.fetch_bytes_per_s)
        or len(new.replicas) != len(written.replicas)
        or any(
            _replica_has_changed(before, now)
            for before, now in zip(written.replicas, new.replicas, strict=True)
        )
    )


def rate_moved(old: float, new: float) -> bool:
    """Return whether a rate has moved by more than a tenth."""
    return abs(new - old) > RATE_STEP * old


def _replica_has_changed(before: ReplicaReport, now: ReplicaReport) -> bool:
    return (
        # A fetch reports its progress.
        now.state is ReplicaState.FETCHING
        or _replica_fields(now) != _replica_fields(before)
        or any(
            rate_moved(getattr(before.profile, rate), getattr(now.profile, rate))
            for rate in ReplicaProfile.__struct_fields__
        )
    )
