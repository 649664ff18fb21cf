"""The vocabulary of a Hugging Face folder: tokenizer.json and the configurations beside it."""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.hf_config import DecoderConfig, read_json, read_optional_json


class _TokenizerConfig(msgspec.Struct):
    """The part of tokenizer_config.json that the engine uses."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct):
    """The part of generation_config.json that the engine uses."""

    eos_token_id: int | list[int] | None = None


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that says how tokens are spelled."""

    decoder: dict[str, Any] | None = None
    model: dict[str, Any] = {}


def read_folder_vocabulary(folder: Path, config: DecoderConfig) -> Vocabulary:
    """Read the vocabulary of a Hugging Face folder, or raise CheckpointError."""
    path = folder / "tokenizer.json"
    file: _TokenizerFile = read_json(path, _TokenizerFile)
    byte_level = '"ByteLevel"' in msgspec.json.encode(file.decoder).decode()
    if not byte_level and not file.model.get("byte_fallback"):
        raise CheckpointError(f"cannot load {path}: neither byte-level nor byte-fallback tokens")
    tokenizer = read_tokenizer(path)
    settings = read_optional_json(folder / "tokenizer_config.json", _TokenizerConfig)
    eos_token = _token_text(settings.eos_token)
    generation = read_optional_json(folder / "generation_config.json", _GenerationConfig)
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
        chat_template=_chat_template(folder, settings),
        bos_token=_token_text(settings.bos_token),
        eos_token=eos_token,
    )


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or raise CheckpointError."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The tokenizers package raises bare Exception for a file it cannot use.
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: {error}") from error
    check_tokenizer(path, tokenizer)
    return tokenizer


def check_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if the tokenizer fails on letters, digits, NUL, emoji or no text."""
    try:
        tokenizer.encode_batch(["a B\n12 é日🗼\x00", ""])
    # The tokenizers package raises bare Exception for tables that contradict each other.
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: its tokenizer: {error}") from error


def combine_templates(plain: Any, with_tools: Any) -> str | None:
    """Return one chat template from two, for a model with a separate one for tool requests."""
    if isinstance(plain, str) and isinstance(with_tools, str):
        return f"{{% if tools %}}{with_tools}{{% else %}}{plain}{{% endif %}}"
    return plain if isinstance(plain, str) else None


def _token_text(token: str | dict[str, Any] | None) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _chat_template(folder: Path, settings: _TokenizerConfig) -> str | None:
    """Return the chat template of chat_template.jinja, else that of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
    template = settings.chat_template
    if isinstance(template, list):
        named = {entry.get("name", ""): entry.get("template") for entry in template}
        return combine_templates(named.get("default"), named.get("tool_use"))
    return template
