"""OpenAI response bodies: chunks of a stream, complete answers, tool calls, usage, logprobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nodeagent.engine.chat.call_parser import (
    CallStarted,
    ContentText,
    OutputEvent,
    ToolCallParser,
)
from nodeagent.engine.chat.reasoning import OutputPart, ReasoningSplitter
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.sampling.sampler import SampledToken
from nodeagent.engine.scheduler.sequence import FinishReason
from nodeagent.engine.tokenizer.vocabulary import Vocabulary

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"

ChoiceEvent = OutputEvent | OutputPart
"""The parts of a choice's text; an `OutputPart` is reasoning."""


def sse_event(body: dict[str, Any]) -> bytes:
    """Frame `body` as a server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


@dataclass(slots=True)
class ResponseChoice:
    """One of a request's answers, as far as it was generated."""

    index: int
    parser: ToolCallParser | None = None
    """Finds tool calls in the text, if the request has tools."""
    reasoning: ReasoningSplitter | None = None
    """Separates reasoning from the text, if the model reasons."""
    reasoning_text: list[str] = field(default_factory=list)
    reasoning_tokens: int = 0
    text: list[str] = field(default_factory=list)
    offset_chars: int = 0
    """Characters of the tokens whose log-probabilities were already emitted."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    output_tokens: int = 0
    sent_tokens: int = 0
    """The output tokens whose text is in the chunks of the stream so far."""
    cached_tokens: int = 0
    finish: str | None = None
    stop_string: str = ""

    def events(self, delta: GenerationDelta) -> list[ChoiceEvent]:
        """Take `delta` and return the reasoning, content and calls that it makes certain."""
        self.output_tokens, self.cached_tokens = delta.output_tokens, delta.cached_tokens
        parts = [OutputPart(delta.text, is_reasoning=False)] if delta.text else []
        if self.reasoning is not None:
            if self.reasoning.is_open:
                self.reasoning_tokens = delta.output_tokens
            parts = self.reasoning.feed(delta.text)
            if delta.finish is not None:
                parts += self.reasoning.flush()
        events: list[ChoiceEvent] = []
        for part in parts:
            if part.is_reasoning:
                events.append(part)
            elif self.parser is not None:
                events += self.parser.feed(part.text)
            else:
                events.append(ContentText(part.text))
        if self.parser is not None and delta.finish is not None:
            events += self.parser.flush()
        if delta.finish is not None:
            has_calls = self.parser is not None and self.parser.calls > 0
            is_call_end = has_calls and delta.finish is FinishReason.STOP
            self.finish = "tool_calls" if is_call_end else delta.finish
            self.stop_string = delta.stop_string
        return events


@dataclass(slots=True)
class CompletionResponse:
    """The response to a chat or a plain completion, streamed or complete."""

    id: str
    model: str
    created_s: int
    chat: bool
    include_usage: bool
    logprobs: bool
    vocabulary: Vocabulary
    new_call_id: Callable[[], str]
    choices: Sequence[ResponseChoice]

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    def opening_chunks(self) -> list[bytes]:
        """Return the first chunks of a chat stream, which give the role."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(choice.index, delta, None, None) for choice in self.choices]

    def chunks(self, delta: GenerationDelta) -> list[bytes]:
        """Return the stream's chunks for `delta`; none while its text is held back."""
        choice = self.choices[delta.choice]
        sampled = [delta.sampled] if self.logprobs and delta.sampled else []
        parts = [self._chunk_delta(event) for event in choice.events(delta)]
        if sampled and not parts:
            parts = [{"content": ""}]
        logprobs = self._logprobs(choice, sampled) if self.logprobs and parts else None
        frames = []
        for number, part in enumerate(parts):
            tokens = choice.output_tokens - choice.sent_tokens
            choice.sent_tokens = choice.output_tokens
            sent_logprobs = None if number else logprobs
            frames.append(self._chunk(choice.index, part, sent_logprobs, None, tokens=tokens))
        if choice.finish is not None:
            frames.append(self._chunk(choice.index, {}, None, choice.finish, choice.stop_string))
        return frames

    def closing_chunks(self, prompt_tokens: int) -> bytes:
        """Return the end of the stream: the usage if the client wants it, then `[DONE]`."""
        if not self.include_usage:
            return DONE
        usage = self._usage(prompt_tokens)
        return sse_event({**self._head(is_stream=True), "choices": [], "usage": usage}) + DONE

    def collect(self, delta: GenerationDelta) -> None:
        """Keep `delta` for a complete response."""
        choice = self.choices[delta.choice]
        for event in choice.events(delta):
            if isinstance(event, ContentText):
                choice.text.append(event.text)
            elif isinstance(event, OutputPart):
                choice.reasoning_text.append(event.text)
            elif isinstance(event, CallStarted):
                choice.calls.append(self._call(event))
            else:
                choice.calls[event.index]["function"]["arguments"] += event.text
        if self.logprobs and delta.sampled:
            choice.sampled.append(delta.sampled)

    def complete_body(self, prompt_tokens: int) -> bytes:
        """Return the body of a response that is not streamed."""
        choices = [self._complete_choice(choice) for choice in self.choices]
        usage = self._usage(prompt_tokens)
        return _encode({**self._head(is_stream=False), "choices": choices, "usage": usage})

    def _complete_choice(self, choice: ResponseChoice) -> dict[str, Any]:
        text = "".join(choice.text)
        body: dict[str, Any] = {"index": choice.index}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message["content"] = text or None
                message["tool_calls"] = choice.calls
            if choice.reasoning_text:
                message["reasoning_content"] = "".join(choice.reasoning_text)
            body["message"] = message
        else:
            body["text"] = text
        body["logprobs"] = self._logprobs(choice, choice.sampled) if self.logprobs else None
        body["finish_reason"] = choice.finish
        if choice.stop_string:
            body["stop_reason"] = choice.stop_string
        return body

    def _usage(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the usage object: each prompt once, and the output of every choice."""
        output_tokens = sum(choice.output_tokens for choice in self.choices)
        cached_tokens = sum(choice.cached_tokens for choice in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if any(choice.reasoning is not None for choice in self.choices):
            reasoning_tokens = sum(choice.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage

    def _chunk_delta(self, event: ChoiceEvent) -> dict[str, Any]:
        """Return the `delta` of the chunk for `event`."""
        if isinstance(event, OutputPart):
            return {"reasoning_content": event.text}
        if isinstance(event, ContentText):
            return {"content": event.text}
        if isinstance(event, CallStarted):
            return {"tool_calls": [{"index": event.index, **self._call(event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _call(self, event: CallStarted) -> dict[str, Any]:
        function = {"name": event.name, "arguments": ""}
        return {"id": self.new_call_id(), "type": "function", "function": function}

    def _head(self, *, is_stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if is_stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any,
        finish: str | None,
        stop_string: str = "",
        tokens: int = 1,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish
        if stop_string:
            # vLLM's field, with which a client can tell its stop strings apart.
            choice["stop_reason"] = stop_string
        if tokens != 1:
            # Text of several tokens, as of one character that has several: routers count by it.
            choice["generated_tokens"] = tokens
        body = {**self._head(is_stream=True), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return sse_event(body)

    def _logprobs(self, choice: ResponseChoice, sampled: list[SampledToken]) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._chat_logprob(token) for token in sampled], "refusal": None}
        offsets: list[int] = []
        for token in sampled:
            offsets.append(choice.offset_chars)
            choice.offset_chars += len(self._token_text(token.token))
        return {
            "tokens": [self._token_text(token.token) for token in sampled],
            "token_logprobs": [token.logprob for token in sampled],
            # The sampled token is always among them.
            "top_logprobs": [
                {self._token_text(t): p for t, p in ((token.token, token.logprob), *token.top)}
                for token in sampled
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, sampled: SampledToken) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in sampled.top]
        return {**self._alternative(sampled.token, sampled.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self.vocabulary.token_bytes(token)
        return {"token": self._token_text(token), "logprob": logprob, "bytes": list(raw)}

    def _token_text(self, token: int) -> str:
        raw = self.vocabulary.token_bytes(token)
        if raw:
            return raw.decode(errors="replace")
        return str(self.vocabulary.tokenizer.id_to_token(token) or "")
