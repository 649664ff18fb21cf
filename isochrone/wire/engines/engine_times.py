"""How an engine spent the time of a traced request: a header of its answer, from engine to node.

The engine exports no spans. It answers a request that has a `traceparent` with the times up to the
head of the answer, which a stream has with its first token, and a prefill leg with its first
blocks; the node makes spans of them.
"""

from typing import Final

import msgspec

ENGINE_TIMES: Final = "x-isochrone-engine-times"
_VALUE_CHARS_MAX: Final = 24
_SECONDS_MAX: Final = 86_400.0
"""No request takes a day. A step that began before 1970 cannot be written as a span."""


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a request in an engine, in their order, in seconds.

    It waits for KV of another engine, waits in the queue, and its prompt is computed up to the
    first token. `decode` is 0 for a stream: its head is sent before.
    """

    wait_kv: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def steps(self) -> list[tuple[str, float]]:
        """Return the names and times of the steps that took any time, in order."""
        named = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        return [(name, seconds) for name, seconds in named if seconds > 0]


def format_times(times: EngineTimes) -> str:
    """Return the header's value."""
    return ";".join(f"{name}={seconds:.6f}" for name, seconds in times.steps())


def parse_times(text: str) -> EngineTimes:
    """Read the header's value; a time that is missing or malformed is 0."""
    found: dict[str, float] = {}
    for part in text.split(";")[: len(EngineTimes.__struct_fields__)]:
        name, _, value = part.partition("=")
        try:
            seconds = float(value[:_VALUE_CHARS_MAX])
        except ValueError:
            continue
        if name in EngineTimes.__struct_fields__ and 0 < seconds <= _SECONDS_MAX:
            found[name] = seconds
    return EngineTimes(**found)
