"""A request's tools and this model's way to call them, brought together."""

from dataclasses import dataclass, replace

from nodeagent.engine.structured.grammar import Grammar
from nodeagent.engine.tokenizer.chat_template import ChatTemplate
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.tools.call_format import ToolFormat
from nodeagent.engine.tools.call_parser import CallReader
from nodeagent.engine.tools.chat_tools import Tools


@dataclass(frozen=True, slots=True)
class Calling:
    """What holds an output to calls, shows their marks, and reads them."""

    tools: Tools
    how: ToolFormat
    shown: dict[int, str]
    """The format's marks that are special tokens, which are hidden from text otherwise."""

    @classmethod
    def of(
        cls, tools: Tools | None, template: ChatTemplate, vocabulary: Vocabulary
    ) -> "Calling | None":
        """Return how `tools` are called; None where there are none."""
        if tools is None:
            return None
        how = template.tool_format
        if any(tool.strict for tool in tools.callable):
            # What is held to JSON is read as nothing else: no strict tool is called unchecked.
            how = replace(how, tags=False, named=False)
        numbered = {mark: vocabulary.tokenizer.token_to_id(mark) for mark in how.marks}
        shown = {token: mark for mark, token in numbered.items() if token in vocabulary.special_ids}
        return cls(tools, how, shown)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the output, where `answer` is what else it is constrained to."""
        special = {mark: token for token, mark in self.shown.items()}
        return self.tools.grammar(self.how, special, answer)

    def reader(self) -> CallReader:
        """Return what reads this output's calls."""
        return CallReader(self.how, self.tools.schemas, single=self.tools.calls_max == 1)
