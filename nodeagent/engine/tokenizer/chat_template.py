"""The model's own chat template: Jinja from a stranger's file, run in a sandbox that bounds it."""

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

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.tokenizer.vocabulary import SEAM
from nodeagent.engine.tools.call_format import Tool, format_of_template
from nodeagent.engine.tools.chat_tools import in_words

_TEMPLATE_CHARS_MAX: Final = 1_000_000


class UnusableChat(ValueError):
    """The template refuses these messages; the message says why."""


class ChatTemplate:
    """A compiled chat template.

    Only the template itself writes `special` tokens. Where a client writes one, it is cut by a seam
    and so read as the text that it is.
    """

    def __init__(
        self, source: str, bos_token: str, eos_token: str, special: Iterable[str] = ()
    ) -> None:
        if len(source) > _TEMPLATE_CHARS_MAX:
            raise CheckpointError(f"cannot use a chat template of {len(source)} characters")
        # Hugging Face renders with these whitespace rules; templates are written for them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.tool_format = format_of_template(source)
        self.knows_tools = "tools" in source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        marks = [mark for mark in special if len(mark) > 1]
        try:
            begun = f"(?={_either(marks)})."
            self._begun_marks = re.compile(begun, re.DOTALL) if marks else None
            self._template = environment.from_string(source)
        # Deep nesting ends in whatever Python's own parser raises.
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"cannot compile the chat template: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: tuple[Tool, ...] = (),
        wishes: Mapping[str, Any] | None = None,
    ) -> str:
        """Write `messages` and `tools` as the prompt that the model was trained on.

        `wishes` are the client's values for what else the template asks about.
        """
        try:
            messages = self.as_text(messages)
            described = self.as_text([tool.described() for tool in tools])
            if not self.knows_tools:
                messages = in_words(messages, described, self.tool_format)
            return self._template.render(
                {
                    **self.as_text(dict(wishes or {})),
                    **self._tokens,
                    "messages": messages,
                    "tools": described or None,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UnusableChat(f"cannot render these messages: {error}") from error
        except (RecursionError, MemoryError, AttributeError) as error:
            raise UnusableChat("cannot render these messages with the model's template") from error

    def as_text(self, written: Any) -> Any:
        """Return what a client wrote, with a seam in each special token."""
        if isinstance(written, str):
            marks = self._begun_marks
            if marks is None or not marks.search(written):
                return written
            return marks.sub(rf"\g<0>{SEAM}", written)
        if isinstance(written, dict):
            return {self.as_text(key): self.as_text(value) for key, value in written.items()}
        return [self.as_text(one) for one in written] if isinstance(written, list) else written


class _Generation(Extension):
    """`{% generation %}` marks what is trained on; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Scope:
        """Return what stands within; its variables end with it."""
        line = next(parser.stream).lineno
        within = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(within, lineno=line)


def _either(texts: Iterable[str]) -> str:
    """Return a pattern of where any of `texts` begins; it looks at each letter once."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        rests.setdefault(text[0], []).append(text[1:])
    found = [re.escape(letter) + _either(rest) for letter, rest in sorted(rests.items())]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)
