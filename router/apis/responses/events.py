"""Translates a chat completion to a response: frames to events, a complete answer at once. Pure.

Names are from OpenAI's API reference, "The response object" and "Streaming events", and so is the
order: the response is created, items are added, filled and done one after the other, and the last
event holds the whole response. Events are numbered.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.earlier_reasoning import encode_reasoning
from router.apis.responses.text_names import (
    OUTPUT_TEXT,
    REASONING_TEXT,
    SUMMARY_TEXT,
    TEXT_NAMES,
)
from router.apis.responses.tools import CalledName, called_names
from router.apis.responses.translate import (
    ReasoningSettings,
    ResponsesRequest,
    TextFormat,
    is_summarised,
)
from router.apis.translating_writer import ITEM_CHARS, KeptOutput
from router.dataplane import sse
from router.dataplane.chunk import ToolCallDelta, read_output
from router.dataplane.usage import reasoning_tokens_of

EVENT: Final = b"event: "
IN_PROGRESS: Final = "in_progress"
INCOMPLETE: Final = "incomplete"
COMPLETED: Final = "completed"
ENCRYPTED_CONTENT: Final = "reasoning.encrypted_content"

_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""A response's reason to be incomplete, by the finish reason of its chat completion."""

ItemEvent = tuple[str, dict[str, Any]]
"""An event of an output item: its name and its fields."""


class TextItem:
    """An output item of generated text: a message, or reasoning."""

    def __init__(self, kind: str, id_suffix: str, *, is_encoded: bool) -> None:
        """`kind` is the type of its part. With `is_encoded` it has an `encrypted_content`, too."""
        self.kind = kind
        self.text = ""
        self._names = TEXT_NAMES[kind]
        self._is_encoded = is_encoded
        self.id = f"{'msg' if kind == OUTPUT_TEXT else 'rs'}_{id_suffix}"

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as JSON."""
        parts = [] if status == IN_PROGRESS else [self._part()]
        item: dict[str, Any] = {"id": self.id, "status": status, self._names.parts: parts}
        if self.kind == OUTPUT_TEXT:
            return {**item, "type": "message", "role": "assistant"}
        item = {"type": "reasoning", "summary": [], **item}
        if self._is_encoded and status != IN_PROGRESS:
            item["encrypted_content"] = encode_reasoning(self.text)
        return item

    def opening_events(self) -> list[ItemEvent]:
        """Return the events that begin the item's content."""
        return [(f"{self._names.part}.added", self._at_part({"part": self._part()}))]

    def append(self, text: str) -> ItemEvent:
        """Add text; return its event."""
        self.text += text
        fields = self._with_logprobs({"delta": text})
        return f"{self._names.text}.delta", self._at_part(fields)

    def closing_events(self) -> list[ItemEvent]:
        """Return the events that end the item's content."""
        fields = self._with_logprobs({"text": self.text})
        return [
            (f"{self._names.text}.done", self._at_part(fields)),
            (f"{self._names.part}.done", self._at_part({"part": self._part()})),
        ]

    def _at_part(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add the place of the part: an item has one."""
        return {self._names.place: 0, **fields}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind, "text": self.text}
        if self.kind == OUTPUT_TEXT:
            part["annotations"] = []
        return self._with_logprobs(part)

    def _with_logprobs(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add the empty list that the reference requires for output text."""
        return {**fields, "logprobs": []} if self.kind == OUTPUT_TEXT else fields


class FunctionCallItem:
    """An output item of a function call whose arguments are being generated."""

    kind = "function_call"

    def __init__(
        self, call: ToolCallDelta, id_suffix: str, called_names: Mapping[str, CalledName]
    ) -> None:
        self.index = call.index
        self.id = f"fc_{id_suffix}"
        self._call_id = call.id or f"call_{id_suffix}"
        name = call.function.name or ""
        self._namespace, self._name = called_names.get(name, ("", name))
        self._arguments = ""

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as JSON."""
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
            **({"namespace": self._namespace} if self._namespace else {}),
        }

    def opening_events(self) -> list[ItemEvent]:
        """Return no events: a function call has no content parts."""
        return []

    def append(self, text: str) -> ItemEvent:
        """Add a part of the arguments; return its event."""
        self._arguments += text
        return "function_call_arguments.delta", {"delta": text}

    def closing_events(self) -> list[ItemEvent]:
        """Return the event that ends the arguments."""
        fields = {"name": self._name, "arguments": self._arguments}
        return [("function_call_arguments.done", fields)]


class ResponseEvents:
    """Builds one response from chat completion frames or from one complete answer."""

    def __init__(self, request: ResponsesRequest, response: dict[str, Any]) -> None:
        """Begin with a request and its response, as `new_response` returns it."""
        self._response = response
        self._is_encoded = ENCRYPTED_CONTENT in (request.include or ())
        self._reasoning_kind = SUMMARY_TEXT if is_summarised(request) else REASONING_TEXT
        self._called_names = called_names(request.tools or ())
        self._next_number = 0
        self._output: list[dict[str, Any]] = []
        self._item: TextItem | FunctionCallItem | None = None
        self._kept = KeptOutput()
        self._finish_reason: str | None = None
        self._usage: Any = None
        self.final: dict[str, Any] | None = None
        """The response as it ended; None before."""

    def translate_frame(self, frame: bytes) -> bytes:
        """Return the events of one frame; comments and frames that are events stay unchanged."""
        data = sse.frame_data(frame)
        if not data or frame.startswith(EVENT):
            return frame
        events = b"" if self._next_number else self._first_events()
        if data == b"[DONE]":
            events += self._close_item(self._status())
            response = self._final_response()
            return events + self._event(response["status"], {"response": response})
        return events + (self._read_chunk(data) or b"")

    def translate_body(self, body: bytes) -> bytes:
        """Return the response for a complete chat completion. Raises ApiError if it is none."""
        self._kept.is_limited = False
        # Read the body as one frame, and drop the events.
        if self._read_chunk(body) is None:
            raise ApiError(
                ErrorCode.UPSTREAM, "cannot answer: the replica did not return a chat completion"
            )
        self._close_item(self._status())
        return msgspec.json.encode(self._final_response())

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends an incomplete response."""
        error_body = {"code": "server_error", "message": error.message}
        output = [*self._output, *([self._item.body(INCOMPLETE)] if self._item else [])]
        response = {**self._response, "status": "failed", "error": error_body, "output": output}
        self.final = response
        return self._event("failed", {"response": response})

    def _first_events(self) -> bytes:
        fields = {"response": self._response}
        return self._event("created", fields) + self._event(IN_PROGRESS, fields)

    def _read_chunk(self, data: bytes) -> bytes | None:
        """Return the events of a chunk's data; None if it is not a chunk."""
        part = read_output(data)
        if part is None:
            return None
        self._usage = part.usage or self._usage
        self._finish_reason = part.finish_reason or self._finish_reason
        events = self._add_text(self._reasoning_kind, part.reasoning)
        events += self._add_text(OUTPUT_TEXT, part.text)
        return events + b"".join([self._add_call(call) for call in part.calls])

    def _add_text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if self._item is None or self._item.kind != kind:
            is_encoded = self._is_encoded and kind != OUTPUT_TEXT
            events = self._open_item(TextItem(kind, self._id_suffix(), is_encoded=is_encoded))
        return events + self._append(text)

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events, item = b"", self._item
        if not isinstance(item, FunctionCallItem) or item.index != call.index:
            if not call.function.name:
                # The end of a call that is complete already.
                return b""
            events = self._open_item(FunctionCallItem(call, self._id_suffix(), self._called_names))
        return events + self._append(call.function.arguments) if call.function.arguments else events

    def _id_suffix(self) -> str:
        """Return the suffix of the next item's id: the response's id and the item's position."""
        return f"{self._response['id']}_{len(self._output) + (self._item is not None)}"

    def _open_item(self, item: TextItem | FunctionCallItem) -> bytes:
        """Close the current item and begin `item`; return the events."""
        self._kept.add(ITEM_CHARS)
        events = self._close_item(COMPLETED)
        self._item = item
        events += self._output_event("output_item.added", {"item": item.body(IN_PROGRESS)})
        return events + b"".join([self._item_event(*event) for event in item.opening_events()])

    def _append(self, text: str) -> bytes:
        assert self._item is not None
        self._kept.add(len(text))
        return self._item_event(*self._item.append(text))

    def _close_item(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        events = b"".join([self._item_event(*event) for event in item.closing_events()])
        body = item.body(status)
        events += self._output_event("output_item.done", {"item": body})
        self._output.append(body)
        self._item = None
        return events

    def _status(self) -> str:
        return INCOMPLETE if self._finish_reason in _INCOMPLETE_REASONS else COMPLETED

    def _final_response(self) -> dict[str, Any]:
        reason = _INCOMPLETE_REASONS.get(self._finish_reason or "")
        self.final = {
            **self._response,
            "status": self._status(),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self._output,
            "usage": _translate_usage(self._usage),
        }
        return self.final

    def _output_event(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._event(name, {"output_index": len(self._output), **fields})

    def _item_event(self, name: str, fields: dict[str, Any]) -> bytes:
        assert self._item is not None
        return self._output_event(name, {"item_id": self._item.id, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": f"response.{name}", "sequence_number": self._next_number, **fields}
        self._next_number += 1
        return b"event: response.%b\n%b" % (name.encode(), sse.data_frame(body))


def new_response(
    request: ResponsesRequest, response_id: str, created_at: int, *, is_stored: bool = False
) -> dict[str, Any]:
    """Return the response to `request` before anything is generated."""
    text_format = (request.text and request.text.format) or TextFormat()
    is_schema = text_format.type == "json_schema"
    # Optional in OpenAI's reference, where it may not be null.
    optional: dict[str, Any] = {} if request.user is None else {"user": request.user}
    if request.conversation_id:
        optional["conversation"] = {"id": request.conversation_id}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": IN_PROGRESS,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": request.reasoning or ReasoningSettings(),
        "service_tier": "flex" if request.service_tier == "flex" else "default",
        "store": is_stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        # Only this format has a name and a schema.
        "text": {"format": text_format if is_schema else {"type": text_format.type}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        **optional,
    }


def _translate_usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens_of(usage) or 0},
        "total_tokens": prompt + output,
    }
