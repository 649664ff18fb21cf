"""Whether an engine makes progress. That it answers is not enough (zombies answer 200).

Two watermarks: while requests run, steps or bytes must move within `stall_s`; while idle, a canary
generation must succeed. `/health` failing several times in a row is the third sign.

Time is counted in looks: an agent that was held up, with all of its machine perhaps, saw nothing of
the engine meanwhile and blames it for nothing.
"""

from typing import Final

import msgspec

LOOK_INTERVAL_S: Final = 1.0
UNANSWERED_MAX: Final = 3
CANARIES_MAX: Final = 3


class EngineWatch(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered between two looks at an engine."""

    progress: tuple[int, int] = (0, 0)
    still: int = 0
    unanswered: int = 0
    canaries_failed: int = 0


def observe(
    watch: EngineWatch,
    *,
    answered: bool,
    steps: int,
    bytes_out: int,
    in_flight: int,
) -> EngineWatch:
    """Return what to remember after one look."""
    progress = (steps if answered else watch.progress[0], bytes_out)
    moved = progress != watch.progress or in_flight == 0
    return msgspec.structs.replace(
        watch,
        progress=progress,
        still=0 if moved else watch.still + 1,
        unanswered=0 if answered else watch.unanswered + 1,
    )


def kill_reason(watch: EngineWatch, *, stall_s: float, in_flight: int) -> str:
    """Say in words why the engine must be killed; "" if it must not."""
    if watch.unanswered >= UNANSWERED_MAX:
        return f"it did not answer {watch.unanswered} health checks in a row"
    still_s = watch.still * LOOK_INTERVAL_S
    if in_flight and still_s > stall_s:
        return f"{in_flight} requests run and no token came for {still_s:.0f} s"
    if watch.canaries_failed >= CANARIES_MAX:
        return f"{watch.canaries_failed} canary generations failed in a row"
    return ""
