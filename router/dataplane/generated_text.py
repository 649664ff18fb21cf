"""The text of a stream so far, kept so that another replica can continue it."""

from typing import Final

TEXT_CHARS_MAX: Final = 4 * 1024 * 1024
"""A stream with more text cannot be continued. Without a limit one that does not end takes all of
the router's memory; a million tokens have about as many characters."""


class GeneratedText:
    """Pieces of text, or none of them once they are too long to be kept."""

    __slots__ = ("_chars", "_pieces", "is_kept")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0
        self.is_kept = True
        """False once there was more than TEXT_CHARS_MAX."""

    def __bool__(self) -> bool:
        return self._chars > 0

    def append(self, piece: str) -> None:
        """Add a piece."""
        self._chars += len(piece)
        if self._chars > TEXT_CHARS_MAX:
            self.is_kept = False
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def joined(self) -> str:
        """Return the whole text."""
        return "".join(self._pieces)
