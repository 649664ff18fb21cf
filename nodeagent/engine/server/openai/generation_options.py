"""Translates the fields that control a generation into the engine's own options."""

import math
from dataclasses import dataclass
from typing import Final

from isochrone.wire.digits import parse_digits
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.server.openai.request_body import ChatBody, CompletionBody
from nodeagent.engine.server.openai.request_errors import invalid_request
from nodeagent.engine.server.openai.structured_fields import requested_grammar
from nodeagent.engine.structured.grammar import Grammar

_STOPS_MAX: Final = 16
_STOP_CHARS_MAX: Final = 1024
_TEMPERATURE_MIN: Final = 1e-5
"""A lower temperature means greedy sampling: dividing logits by it would overflow."""
_COMPLETION_TOKENS: Final = 16
"""OpenAI's default `max_tokens` of a plain completion."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The options for generating the answers of a request, independent of its prompt."""

    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    grammar: Grammar | None = None
    speculate: bool = True
    answers_per_prompt: int = 1


def generation_options(body: ChatBody | CompletionBody) -> GenerationOptions:
    """Return the generation options of a request body. Raises ApiError."""
    if isinstance(body, ChatBody):
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        max_tokens = body.max_tokens or _COMPLETION_TOKENS
        logprobs = body.logprobs
    temperature = 1.0 if body.temperature is None else body.temperature
    stream_options = body.stream_options
    return GenerationOptions(
        params=SamplingParams(
            temperature=0.0 if temperature < _TEMPERATURE_MIN else temperature,
            top_p=body.top_p or 1.0,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
            seed=body.seed,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=_logit_bias(body.logit_bias or {}),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
        ),
        max_tokens=max_tokens,
        stops=_stop_strings(body.stop),
        stop_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        grammar=requested_grammar(body),
        speculate=body.speculate is not False,
        answers_per_prompt=body.n or 1,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > _STOPS_MAX or any(len(text) > _STOP_CHARS_MAX for text in stops):
        raise invalid_request(
            "stop",
            f"cannot use field 'stop': expected at most {_STOPS_MAX} strings of"
            f" {_STOP_CHARS_MAX} characters",
        )
    return tuple(text for text in stops if text)


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for token, value in bias.items():
        token_id = parse_digits(token)
        if token_id is None:
            raise invalid_request(
                "logit_bias", f"cannot use field 'logit_bias': {token[:40]!r} is not a token id"
            )
        if not math.isfinite(value) or abs(value) > 100:
            raise invalid_request(
                "logit_bias", f"cannot use field 'logit_bias': {value} is not between -100 and 100"
            )
        pairs.append((token_id, value))
    return tuple(pairs)
