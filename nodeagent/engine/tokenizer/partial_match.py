"""Matches that streamed text may still complete: how much of its end must be held back."""


def partial_match_chars(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
