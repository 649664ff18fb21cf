"""Turns a decoded request body into a request that is ready to run on this model.

Everything that can be refused is refused here, before a generation is created: the prompt's length,
token ids, tools, adapters, headers and the grammar.
"""

import asyncio
import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import context_length_message
from isochrone.wire.http.headers import CACHE_SALT
from nodeagent.engine.chat.chat_template import ChatTemplate, ChatTemplateError
from nodeagent.engine.chat.reasoning import ReasoningUse, without_opening
from nodeagent.engine.core.kv_transfers import OutgoingBlocks
from nodeagent.engine.loading import LoadedEngine
from nodeagent.engine.scheduler.fair_queue import SchedulingParams
from nodeagent.engine.scheduler.sequence import StopConditions
from nodeagent.engine.server.adapters import AdapterRegistry
from nodeagent.engine.server.http_routes import LONG_TEXT_CHARS
from nodeagent.engine.server.openai.generation_options import (
    GenerationOptions,
    generation_options,
)
from nodeagent.engine.server.openai.request_body import (
    ChatBody,
    CompletionBody,
    answer_prefix,
    check_token_ids,
    completion_prompts,
    predicted_text,
    template_arguments,
    template_messages,
)
from nodeagent.engine.server.openai.request_errors import context_length_exceeded, invalid_request
from nodeagent.engine.server.openai.request_headers import (
    scheduling_params,
    tokens_generated_before,
)
from nodeagent.engine.server.openai.tool_fields import RequestTools, requested_tools
from nodeagent.engine.server.openai.tool_use import ToolUse
from nodeagent.engine.structured.compiler import GrammarCompiler
from nodeagent.engine.structured.constraint import Constraint
from nodeagent.engine.weights.lora_adapter import LoraAdapter

_SALT_CHARS_MAX: Final = 256


class TokenisedPrompt(NamedTuple):
    """A tokenised prompt, and when an answer to it stops."""

    tokens: list[int]
    stop_conditions: StopConditions


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, checked and tokenised, from which its generations are created."""

    options: GenerationOptions
    prompts: Ordered[TokenisedPrompt]
    salt: bytes = b""
    """Separates the prefix cache of one tenant from that of another."""
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    reasoning: ReasoningUse | None = None
    adapter: LoraAdapter | None = None
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    predicted_tokens: Ordered[int] = ()
    """Tokens that the client expects in the answer."""
    continues_text: bool = False
    """Whether the answers continue the text at the end of the prompt."""
    outgoing: OutgoingBlocks | None = None
    """The blocks of the prompt that are sent to another engine."""

    @property
    def visible_special(self) -> dict[int, str]:
        """The special tokens that appear in the text, with their spelling."""
        uses = (self.tool_use, self.reasoning)
        return {id_: mark for use in uses if use for id_, mark in use.visible_special.items()}

    @property
    def answers(self) -> int:
        """The number of generations, over all prompts."""
        return len(self.prompts) * self.options.answers_per_prompt


class RequestPreparer:
    """Checks requests against one model and tokenises them."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedEngine,
        adapters: AdapterRegistry,
        context_tokens: int,
    ) -> None:
        self._config = config
        self._vocabulary = loaded.vocabulary
        self._template = loaded.template
        self._adapters = adapters
        self._context_tokens = context_tokens
        self._compiler = GrammarCompiler(loaded.vocabulary)

    def close(self) -> None:
        """Start no further compilation."""
        self._compiler.close()

    async def prepare_chat(self, body: ChatBody, headers: Mapping[str, str]) -> PreparedRequest:
        """Prepare a chat. Raises ApiError."""
        self._check_answers(body, 1)
        template = self._chat_template()
        tools = requested_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        text = self._render_chat(body, tools, template)
        tokens = await self._tokenise_chat(body, text, template)
        tool_use = ToolUse.of(tools, template, self._vocabulary)
        predicted = await self._tokenise(predicted_text(body), "prediction", special=False)
        prepared = await self._prepare(body, headers, [tokens], tool_use, predicted)
        if not template.reasons or prepared.constraint is not None:
            # A constrained output begins with the answer.
            return prepared
        reasoning = ReasoningUse.of(text, answer_prefix(body), self._vocabulary)
        return replace(prepared, reasoning=reasoning)

    async def count_chat_tokens(self, body: ChatBody) -> int:
        """Return how many tokens the prompt of a chat has. Raises ApiError."""
        tools = requested_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        template = self._chat_template()
        text = self._render_chat(body, tools, template)
        return len(await self._tokenise_chat(body, text, template))

    async def prepare_completion(
        self, body: CompletionBody, headers: Mapping[str, str]
    ) -> PreparedRequest:
        """Prepare a plain completion. Raises ApiError."""
        body_prompts = completion_prompts(body)
        self._check_answers(body, len(body_prompts))
        prompts = [
            await self._tokenise(prompt, "prompt", special=True)
            if isinstance(prompt, str)
            else prompt
            for prompt in body_prompts
        ]
        return await self._prepare(body, headers, prompts)

    def _check_answers(self, body: ChatBody | CompletionBody, prompts: int) -> None:
        """Refuse more answers to one request than can run at the same time."""
        answers, limit = prompts * (body.n or 1), self._config.sequences_max
        if answers > limit:
            raise invalid_request(
                "n" if (body.n or 1) > 1 else "prompt",
                f"cannot give {answers} answers to one request: this engine runs {limit} at once",
            )

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise invalid_request(
                "messages", "cannot chat with this model: it has no chat template"
            )
        return self._template

    def _render_chat(
        self, body: ChatBody, tools: RequestTools | None, template: ChatTemplate
    ) -> str:
        """Return the text of a chat's prompt. Raises ApiError."""
        try:
            return template.render(
                template_messages(body),
                tools.described if tools else (),
                template_arguments(body),
            )
        except ChatTemplateError as error:
            raise invalid_request("messages", str(error)) from error

    async def _tokenise_chat(self, body: ChatBody, text: str, template: ChatTemplate) -> list[int]:
        """Return the prompt of a chat, with the beginning of the answer if the client has one."""
        tokens = await self._tokenise(text, "messages", special=False)
        prefix = template.as_text(without_opening(text, answer_prefix(body)))
        return tokens + await self._tokenise(prefix, "messages", special=False)

    async def _tokenise(self, text: str, param: str, *, special: bool) -> list[int]:
        encode = self._vocabulary.encode
        tokens_min = self._vocabulary.token_count_min(text)
        if tokens_min > self._context_tokens:
            # Tokenising megabytes takes seconds and gigabytes, and the text cannot fit.
            raise context_length_exceeded(
                param,
                context_length_message(
                    self._context_tokens, f"your {param} resulted in {tokens_min} tokens or more"
                ),
            )
        try:
            if len(text) > LONG_TEXT_CHARS:
                return await asyncio.to_thread(encode, text, special=special)
            return encode(text, special=special)
        except UnicodeEncodeError as error:
            raise invalid_request(
                param, f"cannot use field '{param}': its text has a lone surrogate"
            ) from error

    async def _prepare(
        self,
        body: ChatBody | CompletionBody,
        headers: Mapping[str, str],
        prompts: list[list[int]],
        tool_use: ToolUse | None = None,
        predicted: Ordered[int] = (),
    ) -> PreparedRequest:
        adapter = await self._adapters.get(body.model)
        options = generation_options(body)
        params = replace(options.params, drawn_before=tokens_generated_before(headers))
        options = replace(options, params=params)
        if tool_use is not None:
            options = replace(options, grammar=tool_use.grammar(options.grammar))
        checked = [
            TokenisedPrompt(tokens, self._stop_conditions(body, options, tokens))
            for tokens in prompts
        ]
        salt = headers.get(CACHE_SALT, "")
        if len(salt) > _SALT_CHARS_MAX:
            raise invalid_request(
                CACHE_SALT,
                f"cannot use header '{CACHE_SALT}': {len(salt)} characters, the limit is"
                f" {_SALT_CHARS_MAX}",
            )
        grammar = options.grammar
        return PreparedRequest(
            options,
            checked,
            salt=salt.encode(errors="surrogateescape"),
            constraint=await self._compiler.compile(grammar) if grammar else None,
            tool_use=tool_use,
            adapter=adapter,
            scheduling=scheduling_params(headers, salt, time.monotonic()),
            predicted_tokens=predicted,
            continues_text=isinstance(body, CompletionBody) or bool(body.continue_final_message),
        )

    def _stop_conditions(
        self, body: ChatBody | CompletionBody, options: GenerationOptions, tokens: list[int]
    ) -> StopConditions:
        """Check a prompt and the options against the model; return when its answer stops."""
        size = self._vocabulary.size
        biased = [token for token, _ in options.params.logit_bias]
        check_token_ids("prompt", tokens, size)
        check_token_ids("logit_bias", biased, size)
        check_token_ids("stop_token_ids", sorted(options.stop_ids), size)
        if not tokens:
            raise invalid_request("prompt", "cannot use field 'prompt': it has no tokens")
        limit = self._context_tokens
        max_tokens = options.max_tokens or max(limit - len(tokens), 1)
        if len(tokens) + max_tokens > limit:
            param = "messages" if isinstance(body, ChatBody) else "prompt"
            excess = f"your {param} resulted in {len(tokens)} tokens"
            if options.max_tokens and len(tokens) < limit:
                excess = (
                    f"you requested {len(tokens) + max_tokens} tokens ({len(tokens)} in the"
                    f" {param}, {max_tokens} in the completion)"
                )
            raise context_length_exceeded(param, context_length_message(limit, excess))
        min_tokens = options.params.min_tokens
        if min_tokens > max_tokens or (min_tokens > 0 and options.grammar is not None):
            other = "a constrained output" if options.grammar else f"max_tokens {max_tokens}"
            raise invalid_request("min_tokens", f"cannot use min_tokens {min_tokens} with {other}")
        # Once a grammar is satisfied it allows nothing but EOS.
        ignore_eos = options.ignore_eos and options.grammar is None
        model_stop_ids = frozenset() if ignore_eos else self._vocabulary.stop_ids
        return StopConditions(max_tokens, model_stop_ids | options.stop_ids)
