"""OpenAI's response bodies of the mock engine."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec

from nodeagent.mock.engine import MockToken
from nodeagent.mock.scripted_calls import MockPiece

LOGPROB_OF_OTHERS: Final = -9999.0
"""OpenAI's value for what is all but impossible: each numbered token was certain."""


class MockAnswerEncoder:
    """Encodes the answers to one request, as the chunks of a stream or as one object.

    With `alternatives` each token comes with its log probability and those of as many tokens.
    """

    def __init__(
        self, *, is_chat: bool, request_id: str, model: str, created: int, alternatives: int | None
    ) -> None:
        self._is_chat = is_chat
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._alternatives = alternatives
        self._request_id = request_id
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        self._head = {"id": answer_id, "created": created, "model": model}

    def first_chunks(self, answers: int) -> bytes:
        """Return a chat's first chunks, which name the role; "" for a completion."""
        if not self._is_chat:
            return b""
        opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(
            self._chunk({"choices": [{"index": index, **opening}]}) for index in range(answers)
        )

    def token_chunk(self, token: MockToken) -> bytes:
        """Return the chunk of one token."""
        text = token.visible
        content: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        if token.piece:
            content = {"delta": {"tool_calls": [self._call_delta(token.answer, token.piece)]}}
        choice = {"index": token.answer, "finish_reason": token.finish_reason, **content}
        if self._alternatives is not None:
            choice["logprobs"] = self._logprobs([token])
        return self._chunk({"choices": [choice]})

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk with the usage."""
        return self._chunk({"choices": [], "usage": usage})

    def complete(self, answers: Sequence[Sequence[MockToken]], usage: dict[str, Any]) -> bytes:
        """Return the answers as one object."""
        choices = [self._choice(tokens) for tokens in answers]
        body = {"object": self._kind, "choices": choices, "usage": usage}
        return msgspec.json.encode({**self._head, **body})

    def _choice(self, tokens: Sequence[MockToken]) -> dict[str, Any]:
        text = "".join(token.visible for token in tokens)
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            calls = self._calls(tokens)
            content = {"message": {**message, "content": None, **calls} if calls else message}
        end = {"index": tokens[-1].answer, "finish_reason": tokens[-1].finish_reason}
        return {**end, "logprobs": self._logprobs(tokens), **content}

    def _calls(self, tokens: Sequence[MockToken]) -> dict[str, Any]:
        """Return the field `tool_calls` of a message; {} without calls."""
        calls: dict[int, dict[str, Any]] = {}
        for token in tokens:
            if token.piece and token.piece.opens_call:
                delta = self._call_delta(token.answer, token.piece)
                calls[delta.pop("index")] = delta
            elif token.piece and token.piece.call:
                calls[token.piece.call.number]["function"]["arguments"] += token.text
        return {"tool_calls": list(calls.values())} if calls else {}

    def _call_delta(self, answer: int, piece: MockPiece) -> dict[str, Any]:
        """Return what a piece adds to a streamed call: its opening names the call."""
        assert piece.call is not None
        index = piece.call.number
        if not piece.opens_call:
            return {"index": index, "function": {"arguments": piece.text}}
        call_id = f"call_{self._request_id}_{answer}_{index}"
        function = {"name": piece.call.name, "arguments": ""}
        return {"index": index, "id": call_id, "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[MockToken]) -> dict[str, Any] | None:
        """Return the log probabilities of tokens: 0, and next to nothing for all others."""
        if self._alternatives is None:
            return None
        texts = [token.text for token in tokens]
        others = [f"other{number} " for number in range(1, self._alternatives)]
        if self._is_chat:
            unlikely = [_logprob(text, LOGPROB_OF_OTHERS) for text in others]
            return {
                "content": [
                    {
                        **_logprob(text, 0.0),
                        "top_logprobs": [_logprob(text, 0.0), *unlikely][: self._alternatives],
                    }
                    for text in texts
                ],
                "refusal": None,
            }
        unlikely_by_text = dict.fromkeys(others, LOGPROB_OF_OTHERS)
        return {
            "tokens": texts,
            "token_logprobs": [0.0] * len(texts),
            "top_logprobs": [{text: 0.0, **unlikely_by_text} for text in texts],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
        }

    def _chunk(self, body: dict[str, Any]) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return b"data: " + msgspec.json.encode({**self._head, "object": kind, **body}) + b"\n\n"


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
