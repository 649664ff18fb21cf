"""What the events and items of generated text call it, by the type of its part.

Names are from OpenAI's API reference, "Streaming events".
"""

from typing import Final, NamedTuple

OUTPUT_TEXT: Final = "output_text"
REASONING_TEXT: Final = "reasoning_text"
SUMMARY_TEXT: Final = "summary_text"


class TextNames(NamedTuple):
    """The names of one kind of text."""

    parts: str
    """The field of an item that lists its parts."""
    part: str
    """The prefix of a part's events."""
    text: str
    """The prefix of the events of its text."""
    place: str
    """The field of these events that holds the part's place among the parts."""


TEXT_NAMES: Final = {
    OUTPUT_TEXT: TextNames("content", "content_part", OUTPUT_TEXT, "content_index"),
    REASONING_TEXT: TextNames("content", "content_part", REASONING_TEXT, "content_index"),
    SUMMARY_TEXT: TextNames(
        "summary", "reasoning_summary_part", "reasoning_summary_text", "summary_index"
    ),
}
