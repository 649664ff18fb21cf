"""A stream of chat completion frames as the events of a response. Pure.

The order is OpenAI's ("Streaming events"): the response is created, items are added, filled and
done one after the other, and the last event is the whole response. Each event has its number.
"""

from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError
from router.apis.responses.answer import (
    call_item,
    ended,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from router.dataplane import sse
from router.dataplane.chunk import CHUNKS, Choice, Delta

EVENT: Final = b"event: "


class Function(msgspec.Struct):
    """What a frame adds to a call."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A call of a function, or a part of one."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


_call: Final = msgspec.json.Decoder(Call)


class Text:
    """An item of text that is being said, or thought."""

    def __init__(self, kind: str, response_id: str, at: int) -> None:
        self.kind = kind
        self.text = ""
        self._response_id = response_id
        self._at = at
        self._item = message_item if kind == "output_text" else reasoning_item
        self._part = text_part if kind == "output_text" else reasoning_part

    def item(self, *, is_done: bool) -> dict[str, Any]:
        """Return the item as it is."""
        return self._item(self._response_id, self._at, self.text if is_done else None)

    def opening(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events that begin its content."""
        return [("content_part.added", {"content_index": 0, "part": self._part("")})]

    def adding(self, text: str) -> tuple[str, dict[str, Any]]:
        """Take more of it; return the event that tells of it."""
        self.text += text
        return f"{self.kind}.delta", self._told({"content_index": 0, "delta": text})

    def closing(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events that end its content."""
        return [
            (f"{self.kind}.done", self._told({"content_index": 0, "text": self.text})),
            ("content_part.done", {"content_index": 0, "part": self._part(self.text)}),
        ]

    def _told(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "logprobs": []} if self.kind == "output_text" else fields


class Calling:
    """A call of a function whose arguments are being written."""

    kind = "function_call"

    def __init__(self, call: Call, response_id: str, at: int) -> None:
        self.index = call.index
        self.call_id = call.id or f"call_{response_id}_{at}"
        self.name = (call.function and call.function.name) or ""
        self.arguments = ""
        self._response_id = response_id
        self._at = at

    def item(self, *, is_done: bool) -> dict[str, Any]:
        """Return the item as it is."""
        status = "completed" if is_done else "in_progress"
        told = (self.call_id, self.name, self.arguments, status)
        return call_item(self._response_id, self._at, *told)

    def opening(self) -> list[tuple[str, dict[str, Any]]]:
        """Return nothing: a call has no parts."""
        return []

    def adding(self, text: str) -> tuple[str, dict[str, Any]]:
        """Take more of its arguments; return the event that tells of it."""
        self.arguments += text
        return "function_call_arguments.delta", {"delta": text}

    def closing(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the event that ends its arguments."""
        told = {"name": self.name, "arguments": self.arguments}
        return [("function_call_arguments.done", told)]


class Events:
    """The events of one response."""

    def __init__(self, response: dict[str, Any]) -> None:
        """Begin with the response as `opened`."""
        self._response = response
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item: Text | Calling | None = None
        self._item_id = ""
        self._finish_reason: str | None = None
        self._usage: Any = None

    def begin(self) -> bytes:
        """Return the events before anything is said."""
        told = {"response": self._response}
        return self._event("created", told) + self._event("in_progress", told)

    def take(self, frame: bytes) -> bytes:
        """Return the events that one frame amounts to; comments and events stay as they are."""
        data = sse.data_of(frame)
        if not data or frame.startswith(EVENT):
            return frame
        if data == b"[DONE]":
            return self._end()
        try:
            chunk = CHUNKS.decode(data)
            choice = chunk.choices[0] if chunk.choices else Choice()
            delta = choice.delta or Delta()
            calls = [_call.decode(raw) for raw in delta.tool_calls or ()]
        except (msgspec.DecodeError, RecursionError, ValueError):
            return b""
        self._usage = chunk.usage or self._usage
        self._finish_reason = choice.finish_reason or self._finish_reason
        return self._said(delta, calls)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a response which is not whole."""
        told = {"code": "server_error", "message": error.message}
        output = [*self._output, *([self._item.item(is_done=True)] if self._item else [])]
        response = {**self._response, "status": "failed", "error": told, "output": output}
        return self._event("failed", {"response": response})

    def _said(self, delta: Delta, calls: list[Call]) -> bytes:
        """Tell of what one frame adds."""
        told = b""
        if delta.reasoning_content:
            told += self._text("reasoning_text", delta.reasoning_content)
        if delta.content:
            told += self._text("output_text", delta.content)
        return told + b"".join([self._calls(call) for call in calls])

    def _text(self, kind: str, text: str) -> bytes:
        told = b""
        if self._item is None or self._item.kind != kind:
            told = self._open(Text(kind, self._response["id"], self._next()))
        return told + self._add(text)

    def _calls(self, call: Call) -> bytes:
        told, item = b"", self._item
        is_named = call.function is not None and call.function.name
        if not isinstance(item, Calling) or item.index != call.index:
            if not is_named:
                # Nothing is left of a call but its end.
                return b""
            told = self._open(Calling(call, self._response["id"], self._next()))
        if call.function is not None and call.function.arguments:
            told += self._add(call.function.arguments)
        return told

    def _next(self) -> int:
        """Return where the next item stands."""
        return len(self._output) + (self._item is not None)

    def _open(self, item: Text | Calling) -> bytes:
        """End the item that was being filled and begin the next."""
        told = self._close()
        begun = item.item(is_done=False)
        self._item, self._item_id = item, begun["id"]
        told += self._of_item("output_item.added", {"item": begun})
        return told + b"".join([self._of_part(*event) for event in item.opening()])

    def _add(self, text: str) -> bytes:
        assert self._item is not None
        return self._of_part(*self._item.adding(text))

    def _close(self) -> bytes:
        if self._item is None:
            return b""
        told = b"".join([self._of_part(*event) for event in self._item.closing()])
        done = self._item.item(is_done=True)
        told += self._of_item("output_item.done", {"item": done})
        self._output.append(done)
        self._item = None
        return told

    def _end(self) -> bytes:
        told = self._close()
        response = ended(self._response, self._output, self._finish_reason, self._usage)
        return told + self._event(response["status"], {"response": response})

    def _of_item(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._event(name, {"output_index": len(self._output), **fields})

    def _of_part(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._of_item(name, {"item_id": self._item_id, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\n%b" % (name.encode(), sse.data_frame(body))
