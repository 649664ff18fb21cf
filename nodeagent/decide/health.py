"""Whether an engine makes progress. That it answers is not enough (zombies answer 200).

Two watermarks: while requests run, steps or bytes must move within `stall_s`; while idle, a canary
generation must succeed. `/health` failing several times in a row is the third sign.
"""

from typing import Final

import msgspec

UNANSWERED_MAX: Final = 3
CANARIES_MAX: Final = 3


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered between two looks at an engine."""

    progress: tuple[int, int] = (0, 0)
    progressed_at: float = 0.0
    unanswered: int = 0
    canaries_failed: int = 0


def look(
    watch: Watch,
    *,
    now: float,
    answered: bool,
    steps: int,
    bytes_out: int,
    in_flight: int,
) -> Watch:
    """Return what to remember after one look."""
    progress = (steps if answered else watch.progress[0], bytes_out)
    moved = progress != watch.progress or in_flight == 0
    return msgspec.structs.replace(
        watch,
        progress=progress,
        progressed_at=now if moved else watch.progressed_at,
        unanswered=0 if answered else watch.unanswered + 1,
    )


def verdict(watch: Watch, *, now: float, stall_s: float, in_flight: int) -> str:
    """Say in words why the engine must be killed; "" if it must not."""
    if watch.unanswered >= UNANSWERED_MAX:
        return f"it did not answer {watch.unanswered} health checks in a row"
    if in_flight and now - watch.progressed_at > stall_s:
        return f"{in_flight} requests run and no token came for {now - watch.progressed_at:.0f} s"
    if watch.canaries_failed >= CANARIES_MAX:
        return f"{watch.canaries_failed} canary generations failed in a row"
    return ""
