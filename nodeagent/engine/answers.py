"""OpenAI answer bodies: chunks of a stream, whole completions, calls of tools, usage, errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nodeagent.engine.decide.sequence import Finish
from nodeagent.engine.decide.tool_reading import CallBegan, CallReader, Event, Said
from nodeagent.engine.sampling import Sampled
from nodeagent.engine.step import Delta
from nodeagent.engine.vocabulary import Vocabulary

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """Frame one server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def usage(prompt_tokens: int, delta: Delta | None) -> dict[str, Any]:
    """Return the usage object after the last `delta`."""
    output_tokens = delta.output_tokens if delta else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": delta.cached_tokens if delta else 0},
    }


@dataclass(slots=True)
class Answer:
    """One answer's identity and shape, chat or plain."""

    id: str
    model: str
    created_s: int
    chat: bool
    include_usage: bool
    logprobs: bool
    vocabulary: Vocabulary
    new_call_id: Callable[[], str]
    reader: CallReader | None = None
    """Reads calls of tools out of the text, where the request has tools."""
    _text: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _sampled: list[Sampled] = field(default_factory=list)
    _text_chars: int = 0

    def opening(self) -> bytes | None:
        """Return the first chunk of a chat stream, which tells the role."""
        if not self.chat:
            return None
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def chunks(self, delta: Delta) -> list[bytes]:
        """Return the chunks that `delta` is told by; none while its text is held back."""
        sampled = [delta.sampled] if self.logprobs and delta.sampled else []
        parts = [self._part(event) for event in self._events(delta)]
        if sampled and not parts:
            parts = [{"content": ""}]
        logprobs = self._logprobs(sampled) if self.logprobs and parts else None
        frames = [
            self._chunk(part, None if index else logprobs, None) for index, part in enumerate(parts)
        ]
        self._text_chars += len(delta.text)
        if delta.finish is not None:
            frames.append(self._chunk({}, None, self._finish(delta.finish)))
        return frames

    def closing(self, prompt_tokens: int, last: Delta) -> bytes:
        """Return the end of the stream: usage where asked for, then the mark."""
        if not self.include_usage:
            return DONE
        return sse({**self._head(True), "choices": [], "usage": usage(prompt_tokens, last)}) + DONE

    def collect(self, delta: Delta) -> None:
        """Keep `delta` for a whole answer."""
        for event in self._events(delta):
            if isinstance(event, Said):
                self._text.append(event.text)
            elif isinstance(event, CallBegan):
                self._calls.append(self._call(event))
            else:
                self._calls[event.index]["function"]["arguments"] += event.text
        if self.logprobs and delta.sampled:
            self._sampled.append(delta.sampled)

    def whole(self, prompt_tokens: int, last: Delta) -> bytes:
        """Return the body of an answer that is not streamed."""
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if self._calls:
                message["content"] = text or None
                message["tool_calls"] = self._calls
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(self._sampled) if self.logprobs else None
        choice["finish_reason"] = self._finish(last.finish)
        body = {**self._head(False), "choices": [choice], "usage": usage(prompt_tokens, last)}
        return _encode(body)

    def _events(self, delta: Delta) -> list[Event]:
        if self.reader is None:
            return [Said(delta.text)] if delta.text else []
        events = self.reader.feed(delta.text)
        return events + self.reader.flush() if delta.finish is not None else events

    def _part(self, event: Event) -> dict[str, Any]:
        """Return the delta that tells `event` in a stream."""
        if isinstance(event, Said):
            return {"content": event.text}
        if isinstance(event, CallBegan):
            return {"tool_calls": [{"index": event.index, **self._call(event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _call(self, event: CallBegan) -> dict[str, Any]:
        function = {"name": event.name, "arguments": ""}
        return {"id": self.new_call_id(), "type": "function", "function": function}

    def _finish(self, finish: Finish | None) -> str | None:
        called = self.reader is not None and self.reader.calls > 0
        return "tool_calls" if called and finish is Finish.STOP else finish

    def _head(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _chunk(self, delta: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish
        body = {**self._head(True), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return sse(body)

    def _logprobs(self, sampled: list[Sampled]) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._entry(one) for one in sampled], "refusal": None}
        offsets: list[int] = []
        at = self._text_chars
        for one in sampled:
            offsets.append(at)
            at += len(self._spell(one.token))
        return {
            "tokens": [self._spell(one.token) for one in sampled],
            "token_logprobs": [one.logprob for one in sampled],
            "top_logprobs": [{self._spell(t): p for t, p in one.top} for one in sampled],
            "text_offset": offsets,
        }

    def _entry(self, one: Sampled) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in one.top]
        return {**self._alternative(one.token, one.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self.vocabulary.token_bytes(token)
        return {"token": self._spell(token), "logprob": logprob, "bytes": list(raw)}

    def _spell(self, token: int) -> str:
        raw = self.vocabulary.token_bytes(token)
        if raw:
            return raw.decode(errors="replace")
        return str(self.vocabulary.tokenizer.id_to_token(token) or "")
