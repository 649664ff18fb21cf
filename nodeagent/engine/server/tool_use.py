"""A request's tools and this model's way to call them, brought together."""

from dataclasses import dataclass, replace

from nodeagent.engine.chat.call_format import ToolCallFormat
from nodeagent.engine.chat.call_parser import ToolCallParser
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.server.tool_fields import RequestTools
from nodeagent.engine.structured.grammar import Grammar
from nodeagent.engine.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What holds an output to calls, shows their marks, and reads them."""

    tools: RequestTools
    call_format: ToolCallFormat
    shown: dict[int, str]
    """The format's marks that are special tokens, which are hidden from text otherwise."""

    @classmethod
    def of(
        cls, tools: RequestTools | None, template: ChatTemplate, vocabulary: Vocabulary
    ) -> "ToolUse | None":
        """Return how `tools` are called; None where there are none."""
        if tools is None:
            return None
        call_format = template.call_format
        if any(tool.strict for tool in tools.callable):
            # What is held to JSON is read as nothing else: no strict tool is called unchecked.
            call_format = replace(call_format, has_tagged_calls=False, has_named_calls=False)
        numbered = {mark: vocabulary.tokenizer.token_to_id(mark) for mark in call_format.marks}
        shown = {token: mark for mark, token in numbered.items() if token in vocabulary.special_ids}
        return cls(tools, call_format, shown)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the output, where `answer` is what else it is constrained to."""
        special = {mark: token for token, mark in self.shown.items()}
        return self.tools.grammar(self.call_format, special, answer)

    def reader(self) -> ToolCallParser:
        """Return what reads this output's calls."""
        return ToolCallParser(
            self.call_format, self.tools.schemas, only_one=self.tools.calls_max == 1
        )
