"""Tokens and text: the tokenizer of either kind of file, and each token's own bytes.

The bytes of a token are what makes streaming exact: text is decoded from bytes, so a character
split over several tokens comes out whole or not at all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.hf_config import DecoderConfig, read_beside, read_json

_SPACE: Final = "\u2581"
SEAM: Final = "\ufdd0"
"""No character: what stands on both sides of it in a chat is tokenised apart."""


@dataclass(slots=True)
class Vocabulary:
    """The tokenizer with what the engine must know about its tokens."""

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
        """Tokens in all, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokenise `text`; `special` adds what the model wants around a plain prompt (BOS)."""
        parts = [text] if special else text.split(SEAM)
        # A batch: only batches leave the interpreter to other threads meanwhile.
        encodings = self.tokenizer.encode_batch(parts, add_special_tokens=special)
        return [token for encoding in encodings for token in encoding.ids]

    @property
    def special_tokens(self) -> list[str]:
        """The special tokens, as they are written."""
        return [str(self.tokenizer.id_to_token(token)) for token in sorted(self.special_ids)]

    def tokens_least(self, text: str) -> int:
        """Return how many tokens `text` must take at least, without tokenising it."""
        if self._piece_bytes_max == 0:
            pieces = self.tokenizer.get_vocab(with_added_tokens=True)
            self._piece_bytes_max = max(len(piece.encode()) for piece in pieces)
        return len(text) // self._piece_bytes_max

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds to the output; none for special tokens."""
        known = self._bytes.get(token)
        if known is None:
            known = b"" if token in self.special_ids else self._spell(token)
            self._bytes[token] = known
        return known

    def _spell(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
            except KeyError:
                # An added token is plain text, not letters that stand for bytes.
                return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable ones are themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTE_OF_LETTER: Final = _byte_letters()


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or raise CheckpointError."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The tokenizers package raises bare Exception for a file it cannot use.
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: {error}") from error
    try_out(path, tokenizer)
    return tokenizer


def try_out(path: Path, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError where the tokenizer fails at what every text may hold."""
    try:
        tokenizer.encode_batch(["a B\n12 é日🗼\x00", ""])
    # The tokenizers package raises bare Exception for tables that do not agree with each other.
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: its tokenizer: {error}") from error


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None
    model: dict[str, Any] = {}


def vocabulary_of_folder(folder: Path, config: DecoderConfig) -> Vocabulary:
    """Read tokenizer.json and tokenizer_config.json of a Hugging Face folder."""
    path = folder / "tokenizer.json"
    described: _TokenizerFile = read_json(path, _TokenizerFile)
    byte_level = '"ByteLevel"' in msgspec.json.encode(described.decoder).decode()
    if not byte_level and not described.model.get("byte_fallback"):
        raise CheckpointError(f"cannot load {path}: neither byte-level nor byte-fallback tokens")
    tokenizer = read_tokenizer(path)
    settings = read_beside(folder / "tokenizer_config.json", _TokenizerConfig)
    eos_token = _content(settings.eos_token)
    generation = read_beside(folder / "generation_config.json", _GenerationConfig)
    stops = [config.eos_token_id, generation.eos_token_id]
    stop_ids = {token for ids in stops for token in (ids if isinstance(ids, list) else [ids])}
    stop_ids.add(tokenizer.token_to_id(eos_token))
    added = tokenizer.get_added_tokens_decoder()
    tokens = range(tokenizer.get_vocab_size(with_added_tokens=True))
    return Vocabulary(
        tokenizer=tokenizer,
        byte_level=byte_level,
        stop_ids=frozenset(token for token in stop_ids if token in tokens),
        special_ids=frozenset(token for token, value in added.items() if value.special),
        chat_template=_template(folder, settings),
        bos_token=_content(settings.bos_token),
        eos_token=eos_token,
    )


def _content(token: str | dict[str, Any] | None) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template(folder: Path, settings: _TokenizerConfig) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.exists():
        try:
            return beside.read_text()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {beside}: {error}") from error
    template = settings.chat_template
    if isinstance(template, list):
        named = {entry.get("name", ""): entry.get("template") for entry in template}
        return either_template(named.get("default"), named.get("tool_use"))
    return template


def either_template(plain: Any, for_tools: Any) -> str | None:
    """Return one chat template of two, where a model has another for requests with tools."""
    if isinstance(plain, str) and isinstance(for_tools, str):
        return f"{{% if tools %}}{for_tools}{{% else %}}{plain}{{% endif %}}"
    return plain if isinstance(plain, str) else None
