"""How models write calls of tools, and the grammars that hold them to it.

Four ways, told apart by what the model's chat template says:

- Hermes and Qwen: `<tool_call>` around each `{"name": ..., "arguments": {...}}`
- Qwen3-Coder and Qwen3.5: `<tool_call>` around each `<function=NAME>`, in which there is a
  `<parameter=KEY>VALUE</parameter>` for each argument
- Llama 3: the output is `{"name": ..., "parameters": {...}}`, several parted by `;`
- Mistral: `[TOOL_CALLS]`, then a list of `{"name": ..., "arguments": {...}}`; newer models
  `[TOOL_CALLS]NAME[ARGS]{...}` for each call

A template that knows no tools is served in Hermes' way, which needs no token of its own. Where a
model must call, it is held to JSON, whichever way it learned.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from nodeagent.engine.structured.grammar import (
    SCHEMA_BYTES_MAX,
    Grammar,
    UnusableGrammar,
    quoted,
    schema_rule,
)

CALLS_MAX: Final = 16
"""Calls in one answer that is made to call."""
TOOLS_MAX: Final = 128
FUNCTION: Final = "<function="
PARAMETER: Final = "<parameter="
NAMED_MARKS: Final = ("[ARGS]", "[CALL_ID]")
NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
TOOLS_BYTES_MAX: Final = 4 * SCHEMA_BYTES_MAX


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

    opening: str
    """What announces a call; empty where an output that is an object is one."""
    closing: str
    """What ends a call; empty where only the output's end does."""
    arguments_key: str
    before: str
    """What stands between the opening and the first object, and so on, as the model writes it."""
    between: str
    after: str
    optional_opening: str = ""
    """A mark that may stand before the first object where `opening` is empty."""
    call_id_chars: int = 0
    """How long a call's id must be, where the chat template insists."""
    tags: bool = False
    """Whether a call may be tags. Models forget the opening around them now and then."""
    named: bool = False
    """Whether a call may be a name, and then its arguments."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What announces a call, in the one way or another."""
        return tuple(mark for mark in (self.opening, FUNCTION if self.tags else "") if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens in a vocabulary, and count as text here."""
        marks = (self.opening, self.closing, self.optional_opening)
        return tuple(mark for mark in (*marks, *(NAMED_MARKS if self.named else ())) if mark)


HERMES: Final = ToolFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    arguments_key="arguments",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
QWEN_CODER: Final = replace(HERMES, tags=True)
LLAMA3: Final = ToolFormat(
    opening="",
    closing="",
    arguments_key="parameters",
    before="",
    between="; ",
    after="",
    optional_opening="<|python_tag|>",
)
MISTRAL: Final = ToolFormat(
    opening="[TOOL_CALLS]",
    closing="",
    arguments_key="arguments",
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    call_id_chars=9,
    named=True,
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


def format_of_template(template: str) -> ToolFormat:
    """Return how the model behind this chat template writes calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if PARAMETER in template and FUNCTION in template:
        return QWEN_CODER
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA3
    return HERMES


def grammar_of_calls(
    tools: tuple[Tool, ...],
    how: ToolFormat,
    calls_max: int,
    special: dict[str, int],
    *,
    speech: bool = False,
) -> Grammar:
    """Return the grammar of 1 to `calls_max` calls of `tools`, and nothing else.

    With `speech` there may be any text before them, or instead. `special` are those of the format's
    marks that are special tokens, which no text can spell.
    """
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    size = 0
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{how.arguments_key}": '
        schema = {"type": "object", **tool.parameters}
        rule = schema_rule(schema, f"tools[{index}]", lenient=not tool.strict)
        size += len(rule)
        rules.append(f'call_{index}: {quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {rule}")
    if size > TOOLS_BYTES_MAX:
        raise UnusableGrammar(
            f"cannot use tools: their parameters take {size} bytes, the limit is {TOOLS_BYTES_MAX}"
        )
    before = _spelled(how.before, special)
    between, after = _spelled(how.between, special), _spelled(how.after, special)
    more = f"({between} call){{0,{calls_max - 1}}}" if calls_max > 1 else ""
    if speech and not how.opening:
        rules.append(r"said: /\s*([^{\s](.|\n)*)?/")
        before = f"said | {before}"
    elif speech and how.opening in special:
        rules.append(r"said: /(.|\n)*/")
        before = f"said | said {before}"
    elif speech:
        # Lazy: it ends where the opening first comes, so that nothing said can hold one.
        rules += [r"said: /(.|\n)*/", rf"begun[lazy]: /(.|\n)*/ {quoted(how.opening)}"]
        before = f"said | begun {_spelled(how.before.removeprefix(how.opening), special)}"
    start = " ".join(part for part in (before, "call", more, after) if part)
    return Grammar(start, "tools", tuple(rules))


def _spelled(text: str, special: dict[str, int]) -> str:
    """Return `text` as terms of a rule, with special tokens by their number."""
    if not text:
        return ""
    for mark, token in special.items():
        if mark in text:
            left, right = text.split(mark, 1)
            terms = (_spelled(left, special), f"<[{token}]>", _spelled(right, special))
            return " ".join(term for term in terms if term)
    return quoted(text)
