"""Decides whether a replica that could not start waits for the memory of its devices.

Rule 1: it waits if its engine lacked memory while its devices have less free memory than was
planned for it. Something outside its plan takes that memory, perhaps a replica that is about to
end. An engine that lacks memory although as much is free needs more than its plan, which is a
failure like any other.
Rule 2: it starts again once the planned memory is free, and after START_RETRY_S in any case,
because it may need less than was planned.
Rule 3: after WAIT_MAX_S it is given up, because other nodes may have memory. A wait for memory is
no failure of the replica's version.
"""

from collections.abc import Sequence
from typing import Final

from isochrone.wire.ids import DeviceId

START_RETRY_S: Final = 60.0
WAIT_MAX_S: Final = 300.0
"""Longer than a replica drains and a large engine takes to end."""

MIB: Final = 1 << 20
LACKS_MEMORY: Final = (
    *("out of memory", "outofmemory", "memoryerror", "not enough memory", "memory is short"),
    *("cannot allocate", "can't allocate", "failed to allocate", "unable to allocate"),
    # vLLM's checks at its start, on a GPU and on a CPU.
    *("free memory on device", "available memory on node"),
)
"""Parts of what engines, libraries and this agent say if memory is short, in lower case."""


def lacks_memory(problem: str, free_bytes: int, planned_bytes: int) -> bool:
    """Return whether a start failed because its device lacks memory that was planned for it.

    `free_bytes` is what was free on the device once the engine had ended.
    """
    text = problem.lower()
    return free_bytes < planned_bytes and any(words in text for words in LACKS_MEMORY)


def may_start(free_bytes: int, planned_bytes: int, waited_s: float) -> bool:
    """Return whether a replica starts again that has waited for memory since its last start."""
    return free_bytes >= planned_bytes or waited_s >= START_RETRY_S


def memory_wait_reason(
    device_ids: Sequence[DeviceId], free_bytes: int, planned_bytes: int, problem: str
) -> str:
    """Return what operators see of a replica that waits. `problem` is why its start failed."""
    return (
        f"waits for memory: {', '.join(device_ids)} has {free_bytes // MIB} MiB free, and"
        f" {planned_bytes // MIB} MiB are planned for this replica; it starts once they are free,"
        f" so end what takes memory outside the plan: {problem}"
    )
