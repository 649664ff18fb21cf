"""Whether a report says anything that the store does not hold already.

Most do not: ten seconds later a node is what it was. Times and rates that merely drift are no news,
as nothing is decided by them; whatever a plan, a route or an operator reads is.
"""

from operator import attrgetter
from typing import Final

from isochrone.wire.report import Profile, ReplicaReport, ReplicaState, Report

RATE_STEP: Final = 0.1
DISK_STEP_BYTES: Final = 8 * 1024**3

_said: Final = attrgetter(
    *("boot_id", "generation", "address", "version", "refusals", "devices"),
    *("artifacts", "in_host_memory", "failure_domain"),
)
_said_of_replica: Final = attrgetter("spec", "state", "reason", "restarts")


def has_changed(written: Report, new: Report) -> bool:
    """Compare a report with the one that was written last."""
    return (
        _said(new) != _said(written)
        or abs(new.disk_free_bytes - written.disk_free_bytes) > DISK_STEP_BYTES
        or rate_moved(written.disk_bytes_per_s, new.disk_bytes_per_s)
        or rate_moved(written.fetch_bytes_per_s, new.fetch_bytes_per_s)
        or len(new.replicas) != len(written.replicas)
        or any(
            _is_other(before, now)
            for before, now in zip(written.replicas, new.replicas, strict=True)
        )
    )


def _is_other(before: ReplicaReport, now: ReplicaReport) -> bool:
    return (
        now.state is ReplicaState.FETCHING
        or _said_of_replica(now) != _said_of_replica(before)
        or any(
            rate_moved(getattr(before.profile, measured), getattr(now.profile, measured))
            for measured in Profile.__struct_fields__
        )
    )


def rate_moved(old: float, new: float) -> bool:
    """Say whether a rate has moved by more than a tenth."""
    return abs(new - old) > RATE_STEP * old
