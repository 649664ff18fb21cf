"""The model's chat template: untrusted Jinja from a model file, run in a bounded sandbox."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.chat.call_format import ToolDefinition, call_format_of_template
from nodeagent.engine.chat.reasoning import template_reasons
from nodeagent.engine.chat.tool_prompt import messages_as_text
from nodeagent.engine.tokenizer.vocabulary import SEAM

_TEMPLATE_CHARS_MAX: Final = 1_000_000


class ChatTemplateError(ValueError):
    """The template cannot render these messages; the error text says why."""


class ChatTemplate:
    """A compiled chat template.

    Only the template itself can write `special` tokens. A special token in a client's text is split
    by a seam, so the tokenizer reads it as ordinary text.
    """

    def __init__(
        self, source: str, bos_token: str, eos_token: str, special: Iterable[str] = ()
    ) -> None:
        if len(source) > _TEMPLATE_CHARS_MAX:
            raise CheckpointError(
                f"cannot use a chat template of {len(source)} characters: the limit is"
                f" {_TEMPLATE_CHARS_MAX}"
            )
        # Hugging Face renders with these whitespace rules, and templates are written for them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.call_format = call_format_of_template(source)
        self.mentions_tools = "tools" in source
        self.reasons = template_reasons(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        marks = [mark for mark in special if len(mark) > 1]
        try:
            # The pattern matches the first letter of a special token.
            starts = f"(?={_any_of(marks)})."
            self._special_starts = re.compile(starts, re.DOTALL) if marks else None
            self._template = environment.from_string(source)
        # For deep nesting, Python's own parser may raise any of these.
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"cannot compile the chat template: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: tuple[ToolDefinition, ...] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages` and `tools` as the prompt that the model was trained on.

        `arguments` are the client's values for further variables of the template. Raises
        ChatTemplateError.
        """
        try:
            messages = self.as_text(messages)
            entries = self.as_text([tool.template_entry() for tool in tools])
            if not self.mentions_tools:
                messages = messages_as_text(messages, entries, self.call_format)
            return self._template.render(
                {
                    **self.as_text(dict(arguments or {})),
                    **self._tokens,
                    "messages": messages,
                    "tools": entries or None,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"cannot render these messages: {error}") from error
        except (RecursionError, MemoryError, AttributeError) as error:
            raise ChatTemplateError(
                "cannot render these messages with the model's template"
            ) from error

    def as_text(self, value: Any) -> Any:
        """Return a client's JSON value with a seam inside every special token in its strings."""
        if isinstance(value, str):
            starts = self._special_starts
            if starts is None or not starts.search(value):
                return value
            return starts.sub(rf"\g<0>{SEAM}", value)
        if isinstance(value, dict):
            return {self.as_text(key): self.as_text(item) for key, item in value.items()}
        return [self.as_text(item) for item in value] if isinstance(value, list) else value


class _GenerationTag(Extension):
    """`{% generation %}`: marks text to train on, and does not change a prompt."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Scope:
        """Return the statements inside the tag, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches any of `texts`, as a prefix tree: linear in the text."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(letter) + _any_of(rest) for letter, rest in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)
