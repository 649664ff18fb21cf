"""Separates a model's reasoning from its answer: the text between `<think>` and `</think>`.

Qwen3, DeepSeek-R1 and most later models reason so. Some write the opening mark themselves, and for
others the chat template does. The text is not changed: an answer to be continued is, mark for mark,
what the model wrote.
"""

from dataclasses import dataclass
from typing import Final

from nodeagent.engine.tokenizer.partial_match import partial_match_chars
from nodeagent.engine.tokenizer.vocabulary import Vocabulary

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


def template_reasons(template: str) -> bool:
    """Return whether a model with this chat template reasons."""
    return OPENING in template and CLOSING in template


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part of an output: reasoning, or not."""

    text: str
    is_reasoning: bool


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How the answer to one prompt begins."""

    is_open: bool
    """Whether it begins within reasoning; otherwise the model may write the opening mark."""
    visible_special: dict[int, str]
    """The marks that are special tokens; text would not show them otherwise."""

    @classmethod
    def of(cls, prompt: str, answer_prefix: str, vocabulary: Vocabulary) -> "ReasoningUse | None":
        """Return how an answer goes on after `answer_prefix`; None if its reasoning is over."""
        is_open = prompt.rstrip().endswith(OPENING)
        if answer_prefix:
            is_open = is_open or answer_prefix.lstrip().startswith(OPENING)
            if not is_open or CLOSING in answer_prefix:
                return None
        ids = {mark: vocabulary.tokenizer.token_to_id(mark) for mark in (OPENING, CLOSING)}
        visible = {token: mark for mark, token in ids.items() if token in vocabulary.special_ids}
        return cls(is_open, visible)

    def splitter(self) -> "ReasoningSplitter":
        """Return a splitter for one output."""
        return ReasoningSplitter(is_open=self.is_open, has_begun=self.is_open)


@dataclass(slots=True)
class ReasoningSplitter:
    """Splits one output. Text that may be a part of a mark is held back until that is decided."""

    is_open: bool = False
    """Whether the output is within reasoning."""
    has_begun: bool = False
    """Whether the output has begun: only its first text may be the opening mark."""
    _held_back: str = ""

    def feed(self, text: str) -> list[OutputPart]:
        """Return the parts that `text` makes certain."""
        self._held_back += text
        if not self.has_begun:
            begins = self._held_back.lstrip()
            if len(begins) < len(OPENING) and OPENING.startswith(begins):
                return []
            self.has_begun = True
            if begins.startswith(OPENING):
                self.is_open = True
                self._held_back = begins[len(OPENING) :]
        if not self.is_open:
            return self._release(len(self._held_back))
        end = self._held_back.find(CLOSING)
        if end < 0:
            return self._release(
                len(self._held_back) - partial_match_chars(self._held_back, CLOSING)
            )
        parts = self._release(end)
        self._held_back = self._held_back[len(CLOSING) :]
        self.is_open = False
        return parts + self._release(len(self._held_back))

    def flush(self) -> list[OutputPart]:
        """Return the text held back, now that the output has ended."""
        return self._release(len(self._held_back))

    def _release(self, chars: int) -> list[OutputPart]:
        text, self._held_back = self._held_back[:chars], self._held_back[chars:]
        return [OutputPart(text, self.is_open)] if text else []


def without_opening(prompt: str, answer_prefix: str) -> str:
    """Return the beginning of an answer without an opening mark that its prompt has already."""
    if prompt.rstrip().endswith(OPENING) and answer_prefix.startswith(OPENING):
        return answer_prefix[len(OPENING) :]
    return answer_prefix
