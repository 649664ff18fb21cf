"""The tools of a request together with the way in which this model calls them."""

from dataclasses import dataclass, replace

from nodeagent.engine.chat.call_format import ToolCallFormat
from nodeagent.engine.chat.call_parser import ToolCallParser
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.server.openai.tool_fields import RequestTools
from nodeagent.engine.structured.grammar import Grammar
from nodeagent.engine.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Constrains an output to valid calls, keeps their marks visible, and parses them."""

    tools: RequestTools
    call_format: ToolCallFormat
    visible_special: dict[int, str]
    """The format's marks that are special tokens; text would not show them otherwise."""

    @classmethod
    def of(
        cls, tools: RequestTools | None, template: ChatTemplate, vocabulary: Vocabulary
    ) -> "ToolUse | None":
        """Return how this model calls `tools`; None if there are none."""
        if tools is None:
            return None
        call_format = template.call_format
        if any(tool.strict for tool in tools.callable):
            # The grammar of a strict tool is JSON. Other forms must not be read as calls, or a
            # strict tool could be called with unchecked arguments.
            call_format = replace(call_format, has_tagged_calls=False, has_named_calls=False)
        ids = {mark: vocabulary.tokenizer.token_to_id(mark) for mark in call_format.marks}
        visible = {token: mark for mark, token in ids.items() if token in vocabulary.special_ids}
        return cls(tools, call_format, visible)

    def grammar(self, answer_grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the output; see `RequestTools.grammar`."""
        special_ids = {mark: token for token, mark in self.visible_special.items()}
        return self.tools.grammar(self.call_format, special_ids, answer_grammar)

    def parser(self) -> ToolCallParser:
        """Return a parser for one output."""
        tools = self.tools
        return ToolCallParser(
            self.call_format,
            tools.schemas,
            only_one=tools.calls_max == 1,
            must_call=tools.must_call,
        )
