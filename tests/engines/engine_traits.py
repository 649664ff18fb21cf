"""What engines do differently, for the conformance suite. All else must be the same for all."""

from collections.abc import Mapping
from typing import Final

import msgspec


class EngineTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine differs from what the suite expects by default.

    `cached_block_tokens` is the unit in which prompts are cached, 0 if no prompt is by default.
    `ends_by_itself` is false where an answer always has `max_tokens`. `checks_model_name` is false
    where a request for any model is answered. `checks_sampling` is false where sampling settings
    out of their range are not refused.
    `has_named_tools` is false where a tool that the request names may be answered with
    text. A feature that is false is refused or ignored.
    """

    cached_block_tokens: int = 16
    ends_by_itself: bool = True
    checks_model_name: bool = True
    checks_sampling: bool = True
    has_stop_strings: bool = True
    has_seeds: bool = True
    has_json_schema: bool = True
    has_tools: bool = True
    has_named_tools: bool = True
    has_logprobs: bool = True
    has_choices: bool = True
    has_token_prompts: bool = True


TRAITS: Final[Mapping[str, EngineTraits]] = {
    "embedded": EngineTraits(),
    "mock": EngineTraits(
        ends_by_itself=False,
        checks_model_name=False,
        checks_sampling=False,
        has_stop_strings=False,
        has_seeds=False,
        has_json_schema=False,
        has_tools=False,
        has_logprobs=False,
        has_choices=False,
    ),
    "vllm": EngineTraits(cached_block_tokens=128, has_named_tools=False),
    "llama_cpp": EngineTraits(
        cached_block_tokens=0,
        checks_model_name=False,
        checks_sampling=False,
        has_named_tools=False,
    ),
}
