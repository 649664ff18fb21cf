"""Translates a chat completion to a message: frames to events, a complete answer at once. Pure.

Names are from Anthropic's API reference, "Streaming messages", and so is the order: the message
starts, each block of its content starts, grows and stops, and the message's end has its usage.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.messages.errors import error_body
from router.apis.translating_writer import ITEM_CHARS, KeptOutput
from router.dataplane import sse
from router.dataplane.chunk import ToolCallDelta, read_output
from router.dataplane.usage import reasoning_tokens_of

EVENT: Final = b"event: "
UNPARSED_INPUT: Final = "unparsed"
"""The key of a tool's input that is not a JSON object, for example because it was cut off."""

_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
"""A message's stop reason, by the finish reason of its chat completion."""


@dataclass(slots=True)
class OpenBlock:
    """A block of content that is being generated: `text`, `thinking` or `tool_use`."""

    kind: str
    fields: dict[str, Any]
    call_index: int = -1
    text: str = ""

    def body(self) -> dict[str, Any]:
        """Return the complete block."""
        if self.kind == "tool_use":
            return {**self.fields, "input": _tool_input(self.text)}
        if self.kind == "thinking":
            return {**self.fields, "thinking": self.text, "signature": signature_of(self.text)}
        return {**self.fields, "text": self.text}


class MessageEvents:
    """Builds one message from chat completion frames or from one complete answer."""

    def __init__(
        self,
        message_id: str,
        model: str,
        *,
        omits_thinking: bool = False,
        fills_context: bool = False,
    ) -> None:
        """Begin a message.

        With `omits_thinking` the text of its reasoning is left out. With `fills_context` only the
        context limits its length.
        """
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._omits_thinking = omits_thinking
        self._fills_context = fills_context
        self._content: list[dict[str, Any]] = []
        self._block: OpenBlock | None = None
        self._kept = KeptOutput()
        self._has_started = False
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage: Any = None

    def take_prompt_tokens(self, count: int) -> None:
        """Take the tokens of the prompt before the first frame. Which are cached is not known."""
        self._usage = {"prompt_tokens": count}

    def translate_frame(self, frame: bytes) -> bytes:
        """Return the events of one frame; comments and frames that are events stay unchanged."""
        data = sse.frame_data(frame)
        if not data or frame.startswith(EVENT):
            return frame
        events = b"" if self._has_started else self._first_events()
        if data == b"[DONE]":
            events += self._close_block()
            end = {"delta": self._end(), "usage": translate_usage(self._usage)}
            return events + _event("message_delta", end) + _event("message_stop", {})
        return events + (self._read_chunk(data) or b"")

    def translate_body(self, body: bytes) -> bytes:
        """Return the message for a complete chat completion. Raises ApiError if it is none."""
        self._kept.is_limited = False
        # Read the body as one frame, and drop the events.
        if self._read_chunk(body) is None:
            raise ApiError(
                ErrorCode.UPSTREAM, "cannot answer: the replica did not return a chat completion"
            )
        self._close_block()
        usage = {**translate_usage(self._usage), "service_tier": "standard"}
        message = {**self._head, "content": self._content, **self._end(), "usage": usage}
        return msgspec.json.encode(message)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends an incomplete message."""
        return _event("error", error_body(error))

    def _first_events(self) -> bytes:
        self._has_started = True
        # `message_delta` has all counts, which an engine has at the end.
        usage = {**translate_usage(self._usage), "service_tier": "standard"}
        end = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        start = _event("message_start", {"message": {**self._head, "content": [], **end}})
        return start + _event("ping", {})

    def _read_chunk(self, data: bytes) -> bytes | None:
        """Return the events of a chunk's data; None if it is not a chunk."""
        part = read_output(data)
        if part is None:
            return None
        self._usage = part.usage or self._usage
        self._finish_reason = part.finish_reason or self._finish_reason
        if isinstance(part.stop_reason, str):
            self._stop_sequence = part.stop_reason
        events = self._add_text("thinking", part.reasoning)
        events += self._add_text("text", part.text)
        return events + b"".join([self._add_call(call) for call in part.calls])

    def _add_text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if self._block is None or self._block.kind != kind:
            events = self._open_block(OpenBlock(kind, {"type": kind, kind: ""}))
        block = self._block
        assert block is not None
        if kind == "thinking" and self._omits_thinking:
            return events
        self._kept.add(len(text))
        block.text += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: ToolCallDelta) -> bytes:
        events, block = b"", self._block
        if block is None or block.kind != "tool_use" or block.call_index != call.index:
            if not call.function.name:
                # The end of a call that is complete already.
                return b""
            call_id = call.id or f"toolu_{self._head['id']}_{call.index}"
            fields = {"type": "tool_use", "id": call_id, "name": call.function.name, "input": {}}
            block = OpenBlock("tool_use", fields, call.index)
            events = self._open_block(block)
        if not call.function.arguments:
            return events
        self._kept.add(len(call.function.arguments))
        block.text += call.function.arguments
        return events + self._delta(
            {"type": "input_json_delta", "partial_json": call.function.arguments}
        )

    def _open_block(self, block: OpenBlock) -> bytes:
        """Close the current block and begin `block`; return the events."""
        self._kept.add(ITEM_CHARS)
        events = self._close_block()
        self._block = block
        empty = {**block.fields, "signature": ""} if block.kind == "thinking" else block.fields
        fields = {"index": len(self._content), "content_block": empty}
        return events + _event("content_block_start", fields)

    def _close_block(self) -> bytes:
        block = self._block
        if block is None:
            return b""
        events = b""
        if block.kind == "thinking":
            events = self._delta({"type": "signature_delta", "signature": signature_of(block.text)})
        events += _event("content_block_stop", {"index": len(self._content)})
        self._content.append(block.body())
        self._block = None
        return events

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": len(self._content), "delta": delta})

    def _end(self) -> dict[str, Any]:
        """Return why the message ended."""
        reason = _STOP_REASONS.get(self._finish_reason or "stop", "end_turn")
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._content):
            # Some engines finish a call that the client required with "stop".
            reason = "tool_use"
        if reason == "max_tokens" and self._fills_context:
            reason = "model_context_window_exceeded"
        stop_sequence = self._stop_sequence if reason == "end_turn" else None
        if stop_sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


def signature_of(thinking: str) -> str:
    """Return the signature of reasoning: a checksum, because reasoning is returned as text.

    Clients that keep only signed reasoning send it back with the conversation.
    """
    return f"sha256:{hashlib.sha256(thinking.encode(errors='replace')).hexdigest()}"


def translate_usage(usage: Any) -> dict[str, Any]:
    """Return the usage as Anthropic counts it: cached tokens are no part of `input_tokens`.

    The tokens of reasoning are included if the engine counts them.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt, output = counts.get("prompt_tokens") or 0, counts.get("completion_tokens") or 0
    cached = min((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, prompt)
    reasoning = reasoning_tokens_of(counts)
    details = {} if reasoning is None else {"thinking_tokens": min(reasoning, output)}
    return {
        "input_tokens": prompt - cached,
        # Writing to the prefix cache costs nothing, so nothing is counted for it.
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        **({"output_tokens_details": details} if details else {}),
    }


def _tool_input(arguments: str) -> dict[str, Any]:
    """Return a tool's input as an object, also if the model generated none."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED_INPUT: arguments}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\n%b" % (name.encode(), sse.data_frame({"type": name, **fields}))
