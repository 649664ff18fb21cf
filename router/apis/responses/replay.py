"""The events of a stored response, the same each time: a client may resume where it stopped. Pure.

The text of an item is one event, because the parts in which the engine sent it are not stored.
"""

from typing import Any, Final

from router.apis.responses.text_names import OUTPUT_TEXT, TEXT_NAMES
from router.dataplane import sse

FINAL: Final = frozenset({"completed", "incomplete", "failed", "cancelled"})
OPENING_EVENTS: Final = 2


class EventLog:
    """Numbers events, and leaves out those that a client has."""

    def __init__(self, starting_after: int) -> None:
        """Leave out events up to the number `starting_after`; -1 for none."""
        self._starting_after = starting_after
        self._next_number = 0
        self.frames: list[bytes] = []

    def add(self, name: str, fields: dict[str, Any]) -> None:
        """Add an event."""
        number, self._next_number = self._next_number, self._next_number + 1
        if number > self._starting_after:
            body = {"type": f"response.{name}", "sequence_number": number, **fields}
            self.frames.append(b"event: response.%b\n%b" % (name.encode(), sse.data_frame(body)))


def opening_events(response: dict[str, Any], starting_after: int) -> list[bytes]:
    """Return the events of a response that has not ended."""
    log = EventLog(starting_after)
    _open(log, response)
    return log.frames


def closing_events(response: dict[str, Any], starting_after: int) -> list[bytes]:
    """Return the events after the opening ones of a response that has ended."""
    log = EventLog(max(starting_after, OPENING_EVENTS - 1))
    _open(log, response)
    for index, item in enumerate(response["output"]):
        _add_item(log, index, item)
    # OpenAI has no event for a response that was cancelled.
    status = "failed" if response["status"] == "cancelled" else response["status"]
    log.add(status, {"response": response})
    return log.frames


def _open(log: EventLog, response: dict[str, Any]) -> None:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "error": None}
    begun["incomplete_details"] = None
    log.add("created", {"response": begun})
    log.add("in_progress", {"response": begun})


def _add_item(log: EventLog, index: int, item: dict[str, Any]) -> None:
    place = {"item_id": item["id"], "output_index": index}
    is_call = item["type"] == "function_call"
    lists = [name for name in ("summary", "content") if name in item]
    empty: dict[str, Any] = {"arguments": ""} if is_call else {name: [] for name in lists}
    opened = {**item, **empty, "status": "in_progress"}
    log.add("output_item.added", {"output_index": index, "item": opened})
    if is_call:
        text = item["arguments"]
        log.add("function_call_arguments.delta", {**place, "delta": text})
        log.add("function_call_arguments.done", {**place, "name": item["name"], "arguments": text})
    else:
        for name in lists:
            for number, part in enumerate(item[name]):
                _add_part(log, place, number, part)
    log.add("output_item.done", {"output_index": index, "item": item})


def _add_part(log: EventLog, item: dict[str, Any], number: int, part: dict[str, Any]) -> None:
    names = TEXT_NAMES[part["type"]]
    place = {**item, names.place: number}
    log.add(f"{names.part}.added", {**place, "part": {**part, "text": ""}})
    logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == OUTPUT_TEXT else {}
    log.add(f"{names.text}.delta", {**place, "delta": part["text"], **logprobs})
    log.add(f"{names.text}.done", {**place, "text": part["text"], **logprobs})
    log.add(f"{names.part}.done", {**place, "part": part})
