"""Tokenizers from GGUF metadata give the same ids as the original implementations."""

import json
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.chat.call_format import ToolDefinition
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.tokenizer.gguf_tokenizer import read_gguf_vocabulary
from nodeagent.engine.tokenizer.vocabulary import _BYTE_OF_LETTER, Vocabulary
from nodeagent.engine.weights.gguf_header import PackedStrings

GOLDEN = json.loads((Path(__file__).parent / "golden_sentencepiece.json").read_text())
"""Made by ops/golden/make_sentencepiece.py."""
PATH = Path("m.gguf")


def described_by(metadata: dict[str, Any]) -> Vocabulary:
    """Arrays of strings come from a file packed."""
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        strings = [string.encode() for string in metadata.get(key, [])]
        packed = [struct.pack("<Q", len(string)) + string for string in strings]
        ends = list(accumulate(map(len, packed)))
        metadata[key] = PackedStrings(PATH, key, b"".join(packed), ends)
    return read_gguf_vocabulary(PATH, metadata)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": GOLDEN["tokens"],
        "tokenizer.ggml.scores": GOLDEN["scores"],
        "tokenizer.ggml.token_type": GOLDEN["types"],
        "tokenizer.ggml.bos_token_id": GOLDEN["bos"],
        "tokenizer.ggml.eos_token_id": GOLDEN["eos"],
        "tokenizer.ggml.unknown_token_id": GOLDEN["unknown"],
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def byte_level(**changes: Any) -> dict[str, Any]:
    letters = {byte: letter for letter, byte in _BYTE_OF_LETTER.items()}
    space = letters[0x20]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(letters[b] for b in range(256)), space + "a", "12", "<|end|>"],
        "tokenizer.ggml.merges": [f"{space} a", "1 2"],
        "tokenizer.ggml.token_type": [1] * 258 + [3],
        "tokenizer.ggml.eos_token_id": 258,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def test_sentencepiece_vocabularies_give_the_ids_of_sentencepiece() -> None:
    described = described_by(sentencepiece())
    assert not described.byte_level
    assert described.stop_ids == {GOLDEN["eos"]}
    for case in GOLDEN["cases"]:
        plain = described.tokenizer.encode(case["text"], add_special_tokens=False)
        assert plain.ids == case["ids"], case["text"]
        assert described.tokenizer.decode(plain.ids) == case["text"]
        begun = described.tokenizer.encode(case["text"]).ids
        assert begun == [GOLDEN["bos"], *case["ids"]]


def test_qwen_splits_digits_and_composes_accents() -> None:
    described = described_by(byte_level(pre="qwen2"))
    assert described.tokenizer.encode("12 a<|end|>").tokens == ["1", "2", "\u0120a", "<|end|>"]
    composed = described.tokenizer.encode("\u00e9").ids
    assert described.tokenizer.encode("e\u0301").ids == composed
    distilled = described_by(byte_level(pre="deepseek-r1-qwen"))
    assert distilled.tokenizer.encode("12 a").tokens == ["1", "2", "\u0120a"]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["gpt-2", "mellum"], "It|'|S|Ġ|Ġ12345|/|\n|camelCase"),
        (["smollm", "refact", "deepseek-coder"], "It|'|S|ĠĠ|1|2|3|4|5|/|\n|camelCase"),
        (["llama-bpe", "llama3", "smaug-bpe"], "It|'S|Ġ|Ġ|123|45|/\n|camelCase"),
        (["qwen2", "megrez", "deepseek-r1-qwen"], "It|'S|Ġ|Ġ|1|2|3|4|5|/\n|camelCase"),
        (["tekken"], "It|'S|Ġ|Ġ|1|2|3|4|5|/\n|camel|Case"),
        (["default"], "It|'|S|Ġ|Ġ|123|45|/|\n|camelCase"),
    ],
)
def test_text_is_split_as_by_the_models_own_tokenizer(kinds: list[str], words: str) -> None:
    for kind in kinds:
        cut = described_by(byte_level(pre=kind)).tokenizer.pre_tokenizer
        found = [word for word, _ in cut.pre_tokenize_str("It'S  12345/\ncamelCase")]
        assert "|".join(found) == words.replace("\n", "\u010a"), kind


@pytest.mark.parametrize(
    ("kind", "tokens"), [("llama3", ["xyz"]), ("tekken", ["xyz"]), ("qwen2", ["x", "y", "z"])]
)
def test_a_word_that_is_a_token_is_not_split_if_the_model_ignores_merges(
    kind: str, tokens: list[str]
) -> None:
    known = [*byte_level()["tokenizer.ggml.tokens"], "xyz"]
    described = described_by(
        byte_level(pre=kind, tokens=known, token_type=[1] * 258 + [3, 1], bos_token_id=258)
    )
    assert described.tokenizer.encode("xyz", add_special_tokens=False).tokens == tokens
    assert (described.tokenizer.encode("xyz").tokens[0] == "<|end|>") is (tokens == ["xyz"])


def test_known_end_tokens_end_an_answer() -> None:
    letters = byte_level()["tokenizer.ggml.tokens"]
    tokens = [*letters, "<|eot_id|>", "<|reserved|>", "<|im_end|>"]
    types = [1] * 258 + [3, 3, 3, 1]
    described = described_by(byte_level(tokens=tokens, token_type=types))
    # One that no file marks as special is text.
    assert described.stop_ids == {258, 259}


def test_the_tool_template_is_used_for_requests_with_tools() -> None:
    plain, for_tools = "plain", "{% macro m() %}tools{% endmacro %}{{ m() }}"
    metadata = {**byte_level(), "tokenizer.chat_template": plain}
    assert described_by({**metadata}).chat_template == plain
    described = described_by({**metadata, "tokenizer.chat_template.tool_use": for_tools})
    assert described.chat_template is not None
    template = ChatTemplate(described.chat_template, "", "")
    assert template.render([]) == "plain"
    assert template.render([], (ToolDefinition("f", "", {}),)) == "tools"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (sentencepiece(model="wordpiece"), "tokenizer 'wordpiece'"),
        (sentencepiece(scores=[1.0]), "not every token has a score"),
        (sentencepiece(token_type=[1]), r"token types \[1\] for"),
        (sentencepiece(token_type=-1), "token types -1 for"),
        (sentencepiece(eos_token_id=10**9), "token id 1000000000 is out of range"),
        (sentencepiece(eos_token_id=-1), "token id -1 is out of range"),
        (sentencepiece(tokens=["a"] * 600), "a token is listed twice"),
        (sentencepiece(tokens=[]), "tokens is missing"),
        (byte_level(pre="martian"), "pre-tokenizer 'martian'"),
        (byte_level(pre=[1]), r"pre-tokenizer \[1\]"),
        (byte_level(merges=["x y"]), "its tokenizer"),
    ],
)
def test_an_invalid_tokenizer_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        described_by(metadata)
