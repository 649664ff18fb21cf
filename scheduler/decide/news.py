"""Whether a report says anything that the store does not hold already.

Most do not: ten seconds later a node is what it was. Times and rates that merely drift are no news,
as nothing is decided by them; whatever a plan, a route or an operator reads is.
"""

from typing import Final

from isochrone.wire.report import Profile, ReplicaReport, ReplicaState, Report

RATE_STEP: Final = 0.1
DISK_STEP_BYTES: Final = 8 * 1024**3


def is_news(written: Report, new: Report) -> bool:
    """Compare a report with the one that was written last."""
    return (
        new.boot_id != written.boot_id
        or new.generation != written.generation
        or new.address != written.address
        or new.version != written.version
        or new.refusals != written.refusals
        or new.artifacts != written.artifacts
        or new.in_host_memory != written.in_host_memory
        or new.failure_domain != written.failure_domain
        or abs(new.disk_free_bytes - written.disk_free_bytes) > DISK_STEP_BYTES
        or is_moved(written.disk_bytes_per_s, new.disk_bytes_per_s)
        or is_moved(written.fetch_bytes_per_s, new.fetch_bytes_per_s)
        or _devices(new) != _devices(written)
        or len(new.replicas) != len(written.replicas)
        or any(
            _is_other(before, now)
            for before, now in zip(written.replicas, new.replicas, strict=True)
        )
    )


def _devices(report: Report) -> list[tuple[str, str, int, bool, str]]:
    return [
        (d.device_id, d.device_class, d.memory_bytes, d.healthy, d.reason) for d in report.devices
    ]


def _is_other(before: ReplicaReport, now: ReplicaReport) -> bool:
    return (
        now.state is not before.state
        or now.state is ReplicaState.FETCHING
        or now.reason != before.reason
        or now.restarts != before.restarts
        or now.spec != before.spec
        or _is_other_profile(before.profile, now.profile)
    )


def _is_other_profile(before: Profile, now: Profile) -> bool:
    return any(
        is_moved(old, new)
        for old, new in (
            (before.load_s, now.load_s),
            (before.memory_bytes, now.memory_bytes),
            (before.prefill_tokens_per_s, now.prefill_tokens_per_s),
            (before.decode_tokens_per_s, now.decode_tokens_per_s),
        )
    )


def is_moved(old: float, new: float) -> bool:
    """Say whether a rate has moved by more than a tenth."""
    return abs(new - old) > RATE_STEP * old
