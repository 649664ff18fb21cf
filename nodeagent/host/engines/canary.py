"""The test requests that an agent sends to idle engines."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

OK: Final = 200
BAD_REQUEST: Final = 400
TOO_MANY_REQUESTS: Final = 429
NO_TOKEN: Final = (0, OK, 500)
"""The statuses of a wrong answer that only an engine gives which cannot be used: 0 is none at all,
and 500 its own failure, as with weights that are no numbers."""
QUOTED_BYTES_MAX: Final = 120


class Canary(NamedTuple):
    """The smallest possible request for one kind of model, and the list that its answer has.

    Without `answer` any answer will do.
    """

    path: str
    body: Mapping[str, Any]
    answer: str

    def problem(self, status: int, answer: bytes) -> str:
        """Return what is wrong with an answer, or "". A full engine refuses, and is healthy."""
        is_right = status == OK and (not self.answer or has_list(answer, self.answer))
        if is_right or status == TOO_MANY_REQUESTS:
            return ""
        lacking = f" without {self.answer!r}" if status == OK else ""
        start = answer[:QUOTED_BYTES_MAX].decode(errors="replace")
        return f"status {status}{lacking}: {start!r}"


CANARIES: Final = {
    "chat": Canary(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0},
        "choices",
    ),
    "embedding": Canary("/v1/embeddings", {"input": "1"}, "data"),
    "rerank": Canary("/v1/rerank", {"query": "1", "documents": ["1"]}, "results"),
    "classify": Canary("/classify", {"input": "1"}, "data"),
    # An image or a voice is too much work for a test, and a sound no JSON: does it answer at all?
    **dict.fromkeys(("transcription", "speech", "image"), Canary("/v1/models", {}, "data")),
}
"""The test request by kind of model. A request without a body is a GET."""

PROMPT_CANARY: Final = Canary(
    "/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}, "choices"
)
"""For a chat model without a chat template, such as a base model: it refuses chats with 400."""


LONG_WORDS: Final = 64
"""The words of a long canary: enough that reading them takes longer than everything else, and few
enough that a slow processor needs seconds at most."""


def long_canary(canary: Canary, word: str) -> Canary:
    """Return a canary of text generation with a prompt of many words, which begins with `word`."""
    text = " ".join([word, *(str(number) for number in range(LONG_WORDS))])
    prompt = {"prompt": text} if "prompt" in canary.body else {}
    chat = {"messages": [{"role": "user", "content": text}]} if "messages" in canary.body else {}
    return canary._replace(body={**canary.body, **prompt, **chat})


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def tokens_read(answer: bytes) -> int:
    """Return how many tokens of the prompt an answer's engine has read; 0 if it does not say so."""
    try:
        usage = msgspec.json.decode(answer, type=_Answer).usage
    except (ValueError, RecursionError):
        return 0
    if usage is None:
        return 0
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return max(0, usage.prompt_tokens - cached)


def has_list(answer: bytes, name: str) -> bool:
    """Return whether an answer is a JSON object with a list `name` that is not empty."""
    try:
        fields = msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return False
    found = fields.get(name) if isinstance(fields, dict) else None
    return isinstance(found, list) and bool(found)
