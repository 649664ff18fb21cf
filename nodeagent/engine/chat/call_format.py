"""The formats in which models write tool calls, and the grammars that enforce them.

The model's chat template tells which of four formats it learned:

- Hermes and Qwen: `<tool_call>` around each `{"name": ..., "arguments": {...}}`
- Qwen3-Coder and Qwen3.5: `<tool_call>` around each `<function=NAME>`, which contains one
  `<parameter=KEY>VALUE</parameter>` per argument
- Llama 3: the output is `{"name": ..., "parameters": {...}}`, several of them separated by `;`
- Mistral: `[TOOL_CALLS]`, then a list of `{"name": ..., "arguments": {...}}`; newer models write
  `[TOOL_CALLS]NAME[ARGS]{...}` for each call

A model whose template does not mention tools is served in the format of Hermes, which needs no
special token. A request that requires a call is constrained to JSON, whatever the format.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from nodeagent.engine.structured.grammar import (
    SCHEMA_BYTES_MAX,
    Grammar,
    GrammarError,
    quote,
    schema_rule,
)

CALLS_MAX: Final = 16
"""Calls in one constrained answer."""
TOOLS_MAX: Final = 128
"""Tools in one request."""
TOOLS_BYTES_MAX: Final = 4 * SCHEMA_BYTES_MAX
"""Bytes of all parameter schemas of a constrained request together."""
FUNCTION_TAG: Final = "<function="
PARAMETER_TAG: Final = "<parameter="
NAMED_CALL_MARKS: Final = ("[ARGS]", "[CALL_ID]")
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The format of tool calls of one model family."""

    opening: str
    """The mark before a call; empty if an output that starts with `{` is a call."""
    closing: str
    """The mark after a call; empty if only the end of the output ends it."""
    arguments_key: str
    start: str
    """The text from the opening to the first object, as the model writes it."""
    separator: str
    """The text between two objects."""
    end: str
    """The text after the last object."""
    optional_opening: str = ""
    """A mark that may precede the first object if `opening` is empty."""
    call_id_chars: int = 0
    """The length of a call id, if the chat template checks it; 0 for any."""
    has_tagged_calls: bool = False
    """Whether a call may be written as tags. Models sometimes omit the opening around them."""
    has_named_calls: bool = False
    """Whether a call may be written as a name followed by its arguments."""

    @property
    def openings(self) -> tuple[str, ...]:
        """All marks that may precede a call."""
        tag = FUNCTION_TAG if self.has_tagged_calls else ""
        return tuple(mark for mark in (self.opening, tag) if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens of a vocabulary, and must stay visible in the text."""
        named = NAMED_CALL_MARKS if self.has_named_calls else ()
        marks = (self.opening, self.closing, self.optional_opening, *named)
        return tuple(mark for mark in marks if mark)


HERMES: Final = ToolCallFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    arguments_key="arguments",
    start="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
QWEN_CODER: Final = replace(HERMES, has_tagged_calls=True)
LLAMA3: Final = ToolCallFormat(
    opening="",
    closing="",
    arguments_key="parameters",
    start="",
    separator="; ",
    end="",
    optional_opening="<|python_tag|>",
)
MISTRAL: Final = ToolCallFormat(
    opening="[TOOL_CALLS]",
    closing="",
    arguments_key="arguments",
    start="[TOOL_CALLS] [",
    separator=", ",
    end="]",
    call_id_chars=9,
    has_named_calls=True,
)


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False

    def template_entry(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


def call_format_of_template(template: str) -> ToolCallFormat:
    """Return the tool call format of the model with this chat template."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if PARAMETER_TAG in template and FUNCTION_TAG in template:
        return QWEN_CODER
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA3
    return HERMES


def tool_call_grammar(
    tools: tuple[ToolDefinition, ...],
    call_format: ToolCallFormat,
    calls_max: int,
    special_ids: dict[str, int],
    *,
    text_allowed: bool,
) -> Grammar:
    """Return the grammar of 1 to `calls_max` calls of `tools`, and nothing else.

    With `text_allowed` any text may come before the calls or in their place. `special_ids` are the
    marks of the format that are special tokens, which no text can spell. Raises GrammarError if the
    schemas cannot be used.
    """
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    schema_bytes = 0
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{call_format.arguments_key}": '
        schema = {"type": "object", **tool.parameters}
        rule = schema_rule(schema, f"tools[{index}]", lenient=not tool.strict)
        schema_bytes += len(rule)
        rules.append(f'call_{index}: {quote(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {rule}")
    if schema_bytes > TOOLS_BYTES_MAX:
        raise GrammarError(
            f"cannot use field 'tools': the parameter schemas take {schema_bytes} bytes, the limit"
            f" is {TOOLS_BYTES_MAX}"
        )
    start = _terms(call_format.start, special_ids)
    separator = _terms(call_format.separator, special_ids)
    end = _terms(call_format.end, special_ids)
    more = f"({separator} call){{0,{calls_max - 1}}}" if calls_max > 1 else ""
    if text_allowed and not call_format.opening:
        rules.append(r"text: /\s*([^{\s](.|\n)*)?/")
        start = f"text | {start}"
    elif text_allowed and call_format.opening in special_ids:
        rules.append(r"text: /(.|\n)*/")
        start = f"text | text {start}"
    elif text_allowed:
        # Lazy: the rule ends at the first opening, so the text itself cannot contain one.
        opening = quote(call_format.opening)
        rules += [r"text: /(.|\n)*/", rf"text_and_opening[lazy]: /(.|\n)*/ {opening}"]
        rest = _terms(call_format.start.removeprefix(call_format.opening), special_ids)
        start = f"text | text_and_opening {rest}"
    return Grammar(
        " ".join(part for part in (start, "call", more, end) if part), "tools", tuple(rules)
    )


def _terms(text: str, special_ids: dict[str, int]) -> str:
    """Return `text` as the terms of a grammar rule, with special tokens as token ids."""
    if not text:
        return ""
    for mark, token in special_ids.items():
        if mark in text:
            left, right = text.split(mark, 1)
            terms = (_terms(left, special_ids), f"<[{token}]>", _terms(right, special_ids))
            return " ".join(term for term in terms if term)
    return quote(text)
