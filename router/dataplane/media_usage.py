"""The usage of an answer with a sound or an image, as its engine reports it."""

from typing import Annotated, Final

import msgspec

from router.dataplane.usage import UsageCount

AUDIO_TOKENS_PER_S: Final = 50
"""An engine that counts seconds of sound is charged as this many prompt tokens for each: the
frames of Whisper's encoder, which is what it computes."""

BYTES_PER_TOKEN: Final = 4
"""Assumed of a text that comes without a usage."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _MediaUsage(msgspec.Struct):
    """The usage of any of these answers: OpenAI has tokens under two names, and seconds."""

    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class _MediaAnswer(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw()


_USAGE_DECODER: Final = msgspec.json.Decoder(_MediaUsage)
_ANSWER: Final = msgspec.json.Decoder(_MediaAnswer)


def media_usage(body: bytes, content_type: str, prompt_tokens_estimate: int) -> UsageCount:
    """Return what a whole answer used, or an estimate if it does not say so."""
    if content_type.startswith("application/json"):
        try:
            counted = read_media_usage(bytes(_ANSWER.decode(body).usage))
        except (ValueError, RecursionError):
            counted = None
        return counted or UsageCount(prompt_tokens_estimate, 0, 0)
    return UsageCount(prompt_tokens_estimate, len(body) // BYTES_PER_TOKEN, 0)


def read_media_usage(usage: bytes) -> UsageCount | None:
    """Return the tokens of a `usage` object, None if it has none that can be read."""
    try:
        counts = _USAGE_DECODER.decode(usage)
    except (ValueError, RecursionError):
        return None
    prompt = counts.input_tokens or counts.prompt_tokens
    prompt = prompt or round(counts.seconds * AUDIO_TOKENS_PER_S)
    output = counts.output_tokens or counts.completion_tokens
    if not (prompt or output):
        return None
    return UsageCount(prompt, output, 0)
