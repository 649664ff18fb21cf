"""OpenAI answer bodies: chunks of a stream, whole completions, calls of tools, usage, errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nodeagent.engine.core.step import Delta
from nodeagent.engine.sampling.sampler import Sampled
from nodeagent.engine.scheduler.sequence import Finish
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.tools.call_parser import CallBegan, CallReader, Event, Said

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """Frame one server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


@dataclass(slots=True)
class Choice:
    """One answer of a request, as far as it has come."""

    index: int
    reader: CallReader | None = None
    """Reads calls of tools out of the text, where the request has tools."""
    text: list[str] = field(default_factory=list)
    spelled_chars: int = 0
    """Characters of all tokens of which log-probabilities were told."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None

    def events(self, delta: Delta) -> list[Event]:
        """Take `delta`; return what it says."""
        self.output_tokens, self.cached_tokens = delta.output_tokens, delta.cached_tokens
        events: list[Event] = [Said(delta.text)] if delta.text else []
        if self.reader is not None:
            events = self.reader.feed(delta.text)
            if delta.finish is not None:
                events += self.reader.flush()
        if delta.finish is not None:
            called = self.reader is not None and self.reader.calls > 0
            self.finish = "tool_calls" if called and delta.finish is Finish.STOP else delta.finish
        return events


@dataclass(slots=True)
class Answer:
    """What is answered to a request, chat or plain."""

    id: str
    model: str
    created_s: int
    chat: bool
    include_usage: bool
    logprobs: bool
    vocabulary: Vocabulary
    new_call_id: Callable[[], str]
    choices: Sequence[Choice]

    @property
    def ended(self) -> bool:
        """Whether all has come."""
        return all(choice.finish is not None for choice in self.choices)

    def opening(self) -> list[bytes]:
        """Return the first chunks of a chat stream, which tell the role."""
        if not self.chat:
            return []
        said = {"role": "assistant", "content": ""}
        return [self._chunk(choice.index, said, None, None) for choice in self.choices]

    def chunks(self, delta: Delta) -> list[bytes]:
        """Return the chunks that `delta` is told by; none while its text is held back."""
        choice = self.choices[delta.choice]
        sampled = [delta.sampled] if self.logprobs and delta.sampled else []
        parts = [self._part(event) for event in choice.events(delta)]
        if sampled and not parts:
            parts = [{"content": ""}]
        logprobs = self._logprobs(choice, sampled) if self.logprobs and parts else None
        frames = [
            self._chunk(choice.index, part, None if place else logprobs, None)
            for place, part in enumerate(parts)
        ]
        if choice.finish is not None:
            frames.append(self._chunk(choice.index, {}, None, choice.finish))
        return frames

    def closing(self, prompt_tokens: int) -> bytes:
        """Return the end of the stream: usage where asked for, then the mark."""
        if not self.include_usage:
            return DONE
        return sse({**self._head(True), "choices": [], "usage": self._usage(prompt_tokens)}) + DONE

    def collect(self, delta: Delta) -> None:
        """Keep `delta` for a whole answer."""
        choice = self.choices[delta.choice]
        for event in choice.events(delta):
            if isinstance(event, Said):
                choice.text.append(event.text)
            elif isinstance(event, CallBegan):
                choice.calls.append(self._call(event))
            else:
                choice.calls[event.index]["function"]["arguments"] += event.text
        if self.logprobs and delta.sampled:
            choice.sampled.append(delta.sampled)

    def whole(self, prompt_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = [self._whole(choice) for choice in self.choices]
        usage = self._usage(prompt_tokens)
        return _encode({**self._head(False), "choices": choices, "usage": usage})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        body: dict[str, Any] = {"index": choice.index}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if choice.calls:
                message["content"] = text or None
                message["tool_calls"] = choice.calls
            body["message"] = message
        else:
            body["text"] = text
        body["logprobs"] = self._logprobs(choice, choice.sampled) if self.logprobs else None
        body["finish_reason"] = choice.finish
        return body

    def _usage(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the usage object: each prompt once, all that was put out."""
        output_tokens = sum(choice.output_tokens for choice in self.choices)
        cached_tokens = sum(choice.cached_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

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

    def _head(self, stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": index}
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

    def _logprobs(self, choice: Choice, sampled: list[Sampled]) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._entry(one) for one in sampled], "refusal": None}
        offsets: list[int] = []
        for one in sampled:
            offsets.append(choice.spelled_chars)
            choice.spelled_chars += len(self._spell(one.token))
        return {
            "tokens": [self._spell(one.token) for one in sampled],
            "token_logprobs": [one.logprob for one in sampled],
            # The sampled token is always among them.
            "top_logprobs": [
                {self._spell(t): p for t, p in ((one.token, one.logprob), *one.top)}
                for one in sampled
            ],
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
