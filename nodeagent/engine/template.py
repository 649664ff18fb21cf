"""The model's own chat template: Jinja from a stranger's file, run in a sandbox that bounds it."""

import json
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nodeagent.engine.decide.tool_format import Tool, format_of_template
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.tools import in_words

_TEMPLATE_CHARS_MAX: Final = 1_000_000


class UnusableChat(ValueError):
    """The template refuses these messages; the message says why."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        if len(source) > _TEMPLATE_CHARS_MAX:
            raise CheckpointError(f"cannot use a chat template of {len(source)} characters")
        # Hugging Face renders with these whitespace rules; templates are written for them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.tool_format = format_of_template(source)
        self.knows_tools = "tools" in source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        # Deep nesting ends in whatever Python's own parser raises.
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"cannot compile the chat template: {error}") from error

    def render(self, messages: list[dict[str, Any]], tools: tuple[Tool, ...] = ()) -> str:
        """Write `messages` and `tools` as the prompt that the model was trained on."""
        if not self.knows_tools:
            messages = in_words(messages, tools, self.tool_format)
        described = [tool.described() for tool in tools] or None
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=described, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UnusableChat(f"cannot render these messages: {error}") from error
        except (RecursionError, MemoryError, AttributeError) as error:
            raise UnusableChat("cannot render these messages with the model's template") from error


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)
