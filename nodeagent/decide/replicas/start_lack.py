"""Decides whether a replica that could not start waits for memory or for a file descriptor.

Rule 1: it waits for memory if its engine lacked some while its devices have less free than was
planned for it. Something outside its plan takes that memory, perhaps a replica that is about to
end. An engine that lacks memory although as much is free needs more than its plan, which is a
failure like any other.
Rule 2: it starts again once the planned memory is free, and after MEMORY_RETRY_S in any case,
because it may need less than was planned.
Rule 3: it waits for a descriptor if the agent had none to start it, and starts again after
DESCRIPTORS_RETRY_S: other work of the agent frees descriptors.
Rule 4: after WAIT_MAX_S it is given up, because other nodes may have what it lacks. The wait does
not count as a failure of the replica's version.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from isochrone.wire.ids import DeviceId

MEMORY_RETRY_S: Final = 60.0
DESCRIPTORS_RETRY_S: Final = 5.0
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


class StartLack(NamedTuple):
    """The `resource` that a start lacked, and the `reason` that operators see during the wait.

    It starts again after `retry_s`, or once `needed_bytes` are free; 0 if it does not lack memory.
    """

    resource: str
    reason: str
    retry_s: float
    needed_bytes: int = 0


def descriptor_lack(problem: str) -> StartLack:
    """Return the lack of a file descriptor. `problem` is why the start failed."""
    reason = f"waits for a free file descriptor of the agent: {problem}"
    return StartLack("free file descriptor", reason, DESCRIPTORS_RETRY_S)


def memory_lack(
    device_ids: Sequence[DeviceId], free_bytes: int, planned_bytes: int, problem: str
) -> StartLack | None:
    """Return the lack of memory if a start failed because its devices lack what was planned.

    `free_bytes` is what was free on each of them once the engine had ended.
    """
    text = problem.lower()
    if free_bytes >= planned_bytes or not any(words in text for words in LACKS_MEMORY):
        return None
    reason = (
        f"waits for memory: {', '.join(device_ids)} has {free_bytes // MIB} MiB free, and"
        f" {planned_bytes // MIB} MiB are planned for this replica; it starts once they are free,"
        f" so end what takes memory outside the plan: {problem}"
    )
    return StartLack("memory", reason, MEMORY_RETRY_S, planned_bytes)


def may_start(lack: StartLack, free_bytes: int, waited_s: float) -> bool:
    """Return whether a replica starts again that has waited since its last start."""
    return waited_s >= lack.retry_s or 0 < lack.needed_bytes <= free_bytes
