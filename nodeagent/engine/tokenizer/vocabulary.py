"""A model's vocabulary: its tokenizer, and the bytes that each token adds to the output.

Streaming decodes text from the bytes of tokens, so a character that spans several tokens appears
whole or not at all.
"""

from dataclasses import dataclass, field
from typing import Final

from tokenizers import Tokenizer

SENTENCEPIECE_SPACE: Final = "\u2581"
"""SentencePiece writes this letter for a space."""
SEAM: Final = "\ufdd0"
"""A Unicode noncharacter. Text before and after it in a rendered chat is tokenised separately."""


@dataclass(slots=True)
class Vocabulary:
    """A tokenizer with the facts about its tokens that the engine needs."""

    tokenizer: Tokenizer
    byte_level: bool
    """True for GPT-2 style tokens, whose letters stand for bytes; else SentencePiece pieces."""
    stop_ids: frozenset[int]
    special_ids: frozenset[int]
    chat_template: str | None
    bos_token: str
    eos_token: str
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _piece_bytes_max: int = 0

    @property
    def size(self) -> int:
        """The number of tokens, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokenise `text`; `special` adds the tokens a model expects around a plain prompt (BOS).

        Without `special`, `text` is cut at each SEAM and its parts are tokenised separately.
        """
        parts = [text] if special else text.split(SEAM)
        # Only `encode_batch` releases the GIL while it works.
        encodings = self.tokenizer.encode_batch(parts, add_special_tokens=special)
        return [token for encoding in encodings for token in encoding.ids]

    @property
    def special_tokens(self) -> list[str]:
        """The spelling of every special token."""
        return [str(self.tokenizer.id_to_token(token)) for token in sorted(self.special_ids)]

    def token_count_min(self, text: str) -> int:
        """Return a lower bound for the number of tokens of `text`, without tokenising it."""
        if self._piece_bytes_max == 0:
            pieces = self.tokenizer.get_vocab(with_added_tokens=True)
            self._piece_bytes_max = max(len(piece.encode()) for piece in pieces)
        return len(text) // self._piece_bytes_max

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds to the output; none for special tokens."""
        known = self._bytes.get(token)
        if known is None:
            known = b"" if token in self.special_ids else self._decode_piece(token)
            self._bytes[token] = known
        return known

    def _decode_piece(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
            except KeyError:
                # An added token is plain text; its letters do not stand for bytes.
                return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace(SENTENCEPIECE_SPACE, " ").encode()


def _gpt2_byte_letters() -> dict[str, int]:
    """Return the byte that each letter stands for in GPT-2's byte-level BPE.

    Printable bytes stand for themselves; the others are mapped to letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTE_OF_LETTER: Final = _gpt2_byte_letters()
