"""Decides whether an engine makes progress. An engine that only answers its health check may hang.

An engine is killed for one of three reasons: with requests in flight, neither its counter of steps
and layers nor the bytes it sends change for `stall_s`; when idle, several canary requests in a row
fail; or it leaves several health checks in a row unanswered. An engine that counts layers may take
longer than `stall_s` for a step, and `stall_s` is longer for one whose steps may be
(step_limit.py). While it waits for KV of other engines it does not stall. Of an engine whose
counters move only when a request ends (`EngineCapabilities.counts_steps`), only the requests count
whose answers have begun. If requests were cancelled while it made no progress, as a router does
with a silent stream, one failed canary is enough.

Time is counted in observations, one each OBSERVE_INTERVAL_S. An agent that was suspended observed
nothing in that time, so the time does not count against the engine.
"""

from typing import Final

import msgspec

OBSERVE_INTERVAL_S: Final = 1.0
UNANSWERED_MAX: Final = 3
CANARY_FAILURES_MAX: Final = 3
SUSPECT_STALLED_MIN: Final = 3
"""Observations without progress after which an engine whose requests have gone is suspect."""


class EngineWatch(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the watch of one engine keeps between two observations.

    `stalled`, `unanswered` and `canary_failures` count consecutive observations or canaries.
    `is_suspect` is true from the time at which its requests left without progress until it makes
    some.
    """

    steps: int = 0
    bytes_out: int = 0
    stalled: int = 0
    unanswered: int = 0
    canary_failures: int = 0
    is_suspect: bool = False


def observe(
    watch: EngineWatch,
    *,
    answered: bool,
    steps: int,
    bytes_out: int,
    in_flight: int,
    is_waiting_for_peers: bool = False,
) -> EngineWatch:
    """Return the watch after one observation.

    `steps`, the steps and layers computed so far, counts only if the engine `answered`.
    """
    if not answered:
        steps = watch.steps
    is_stalled = in_flight > 0 and not is_waiting_for_peers
    is_progress = (steps, bytes_out) != (watch.steps, watch.bytes_out)
    was_left = in_flight == 0 and watch.stalled >= SUSPECT_STALLED_MIN
    return msgspec.structs.replace(
        watch,
        steps=steps,
        bytes_out=bytes_out,
        stalled=watch.stalled + 1 if is_stalled and not is_progress else 0,
        unanswered=0 if answered else watch.unanswered + 1,
        is_suspect=not is_progress and (watch.is_suspect or was_left),
    )


def after_canary(watch: EngineWatch, *, succeeded: bool) -> EngineWatch:
    """Return the watch after a canary request."""
    if succeeded:
        return msgspec.structs.replace(watch, canary_failures=0, is_suspect=False)
    return msgspec.structs.replace(watch, canary_failures=watch.canary_failures + 1)


def kill_reason(watch: EngineWatch, *, stall_s: float, in_flight: int) -> str:
    """Return why the engine must be killed, or "" if it is healthy."""
    if watch.unanswered >= UNANSWERED_MAX:
        return f"the engine left {watch.unanswered} health checks in a row unanswered"
    stalled_s = watch.stalled * OBSERVE_INTERVAL_S
    if in_flight and stalled_s > stall_s:
        return f"{in_flight} requests in flight and no token for {stalled_s:.0f} s"
    if watch.is_suspect and watch.canary_failures:
        return "its requests left without a token, and then a canary request failed"
    if watch.canary_failures >= CANARY_FAILURES_MAX:
        return f"{watch.canary_failures} canary requests in a row failed"
    return ""
