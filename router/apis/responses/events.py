"""A chat completion as a response: a stream's frames as events, a whole answer at once. Pure.

Names are those of OpenAI's API reference, "The response object" and "Streaming events". The order
is OpenAI's too: the response is created, items are added, filled and done one after the other, and
the last event is the whole response. Each event has its number.
"""

from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.responses.translate import ReasoningSettings, ResponsesRequest, TextFormat
from router.dataplane import sse
from router.dataplane.chunk import ChunkChoice, ChunkDelta, chunk_of

EVENT: Final = b"event: "
IN_PROGRESS: Final = "in_progress"
INCOMPLETE: Final = "incomplete"
COMPLETED: Final = "completed"

_CUT: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer that is not whole is not, by its finish reason."""

Told = tuple[str, dict[str, Any]]
"""An event of an item: its name, and what it tells."""


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a frame adds to a call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A call of a function, or a part of one."""

    index: int = 0
    id: str | None = None
    function: FunctionDelta = FunctionDelta()


_call: Final = msgspec.json.Decoder(ToolCallDelta)


class TextItem:
    """An item of text that is being said (`output_text`) or thought (`reasoning_text`)."""

    def __init__(self, kind: str, ending: str) -> None:
        self.kind = kind
        self.text = ""
        self.id = f"{'msg' if kind == 'output_text' else 'rs'}_{ending}"

    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is."""
        content = [] if status == IN_PROGRESS else [self._part()]
        item: dict[str, Any] = {"id": self.id, "status": status, "content": content}
        if self.kind == "output_text":
            return {**item, "type": "message", "role": "assistant"}
        return {**item, "type": "reasoning", "summary": []}

    def opening(self) -> list[Told]:
        """Return the events that begin its content."""
        return [("content_part.added", {"content_index": 0, "part": self._part()})]

    def adding(self, text: str) -> Told:
        """Take more of it; return the event that tells of it."""
        self.text += text
        return f"{self.kind}.delta", self._told({"content_index": 0, "delta": text})

    def closing(self) -> list[Told]:
        """Return the events that end its content."""
        return [
            (f"{self.kind}.done", self._told({"content_index": 0, "text": self.text})),
            ("content_part.done", {"content_index": 0, "part": self._part()}),
        ]

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind, "text": self.text}
        return self._told({**part, "annotations": []} if self.kind == "output_text" else part)

    def _told(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "logprobs": []} if self.kind == "output_text" else fields


class FunctionCallItem:
    """A call of a function whose arguments are being written."""

    kind = "function_call"

    def __init__(self, call: ToolCallDelta, ending: str) -> None:
        self.index = call.index
        self.id = f"fc_{ending}"
        self._call_id = call.id or f"call_{ending}"
        self._name = call.function.name or ""
        self._arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is."""
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
        }

    def opening(self) -> list[Told]:
        """Return nothing: a call has no parts."""
        return []

    def adding(self, text: str) -> Told:
        """Take more of its arguments; return the event that tells of it."""
        self._arguments += text
        return "function_call_arguments.delta", {"delta": text}

    def closing(self) -> list[Told]:
        """Return the event that ends its arguments."""
        told = {"name": self._name, "arguments": self._arguments}
        return [("function_call_arguments.done", told)]


class ResponseEvents:
    """One response and its events."""

    def __init__(self, response: dict[str, Any]) -> None:
        """Begin with the response as `opened`."""
        self._response = response
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item: TextItem | FunctionCallItem | None = None
        self._finish_reason: str | None = None
        self._usage: Any = None

    def take(self, frame: bytes) -> bytes:
        """Return the events that one frame amounts to; comments and events stay as they are."""
        data = sse.data_of(frame)
        if not data or frame.startswith(EVENT):
            return frame
        told = b"" if self._number else self._begun()
        if data == b"[DONE]":
            told += self._close(self._status())
            response = self._ended()
            return told + self._event(response["status"], {"response": response})
        return told + (self._read(data) or b"")

    def whole(self, body: bytes) -> bytes:
        """Return the response that a whole answer amounts to."""
        # Read as if it were one frame; nobody is told its events.
        if self._read(body) is None:
            raise ApiError(ErrorCode.UPSTREAM, "cannot answer: the replica's answer is no chat")
        self._close(self._status())
        return msgspec.json.encode(self._ended())

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a response which is not whole."""
        told = {"code": "server_error", "message": error.message}
        output = [*self._output, *([self._item.item(INCOMPLETE)] if self._item else [])]
        response = {**self._response, "status": "failed", "error": told, "output": output}
        return self._event("failed", {"response": response})

    def _begun(self) -> bytes:
        """Return the events before anything is said."""
        told = {"response": self._response}
        return self._event("created", told) + self._event(IN_PROGRESS, told)

    def _read(self, data: bytes) -> bytes | None:
        """Tell of what one frame adds; None where it is none."""
        chunk = chunk_of(data)
        if chunk is None:
            return None
        choice = chunk.choices[0] if chunk.choices else ChunkChoice()
        said = choice.delta or choice.message or ChunkDelta()
        try:
            calls = [_call.decode(raw) for raw in said.tool_calls or ()]
        except msgspec.DecodeError:
            return None
        self._usage = chunk.usage or self._usage
        self._finish_reason = choice.finish_reason or self._finish_reason
        told = self._text("reasoning_text", said.reasoning_content)
        told += self._text("output_text", said.content)
        return told + b"".join([self._calls(call) for call in calls])

    def _text(self, kind: str, text: str | None) -> bytes:
        if not text:
            return b""
        told = b""
        if self._item is None or self._item.kind != kind:
            told = self._open(TextItem(kind, self._ending()))
        return told + self._add(text)

    def _calls(self, call: ToolCallDelta) -> bytes:
        told, item = b"", self._item
        if not isinstance(item, FunctionCallItem) or item.index != call.index:
            if not call.function.name:
                # Nothing is left of a call but its end.
                return b""
            told = self._open(FunctionCallItem(call, self._ending()))
        return told + self._add(call.function.arguments) if call.function.arguments else told

    def _ending(self) -> str:
        """Return how the id of the next item ends: in where it stands."""
        return f"{self._response['id']}_{len(self._output) + (self._item is not None)}"

    def _open(self, item: TextItem | FunctionCallItem) -> bytes:
        """End the item that was being filled and begin the next."""
        told = self._close(COMPLETED)
        self._item = item
        told += self._of_output("output_item.added", {"item": item.item(IN_PROGRESS)})
        return told + b"".join([self._of_item(*event) for event in item.opening()])

    def _add(self, text: str) -> bytes:
        assert self._item is not None
        return self._of_item(*self._item.adding(text))

    def _close(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        told = b"".join([self._of_item(*event) for event in item.closing()])
        done = item.item(status)
        told += self._of_output("output_item.done", {"item": done})
        self._output.append(done)
        self._item = None
        return told

    def _status(self) -> str:
        return INCOMPLETE if self._finish_reason in _CUT else COMPLETED

    def _ended(self) -> dict[str, Any]:
        """Return the response with all that was said."""
        reason = _CUT.get(self._finish_reason or "")
        return {
            **self._response,
            "status": self._status(),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self._output,
            "usage": _usage(self._usage),
        }

    def _of_output(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._event(name, {"output_index": len(self._output), **fields})

    def _of_item(self, name: str, fields: dict[str, Any]) -> bytes:
        assert self._item is not None
        return self._of_output(name, {"item_id": self._item.id, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": f"response.{name}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\n%b" % (name.encode(), sse.data_frame(body))


def opened(wish: ResponsesRequest, response_id: str, created_at: int) -> dict[str, Any]:
    """Return the response as it is before anything was said."""
    wanted = (wish.text and wish.text.format) or TextFormat()
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": IN_PROGRESS,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wish.instructions,
        "max_output_tokens": wish.max_output_tokens,
        "metadata": wish.metadata or {},
        "model": wish.model,
        "output": [],
        "parallel_tool_calls": wish.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": wish.reasoning or ReasoningSettings(),
        "store": False,
        "temperature": 1.0 if wish.temperature is None else wish.temperature,
        # A name and a schema belong to one kind alone.
        "text": {"format": wanted if wanted.type == "json_schema" else {"type": wanted.type}},
        "tool_choice": wish.tool_choice or "auto",
        "tools": wish.tools or [],
        "top_p": 1.0 if wish.top_p is None else wish.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": wish.user,
    }


def _usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + output,
    }
