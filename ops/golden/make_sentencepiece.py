"""Generates a small SentencePiece vocabulary and the token ids of some texts with sentencepiece.

    python -m ops.golden.make_sentencepiece tests/unit/engine/golden_sentencepiece.json

The engine reads such vocabularies from GGUF files and rebuilds the merges from their scores.
"""

import io
import json
import sys
from pathlib import Path

import sentencepiece  # type: ignore[import-not-found,unused-ignore]

TEXTS = [
    "the three laws of thermodynamics",
    "  two spaces, then\na new line\tand a tab",
    "Grüße aus Zürich 🗼 日本",
    "def reverse(text): return text[::-1]",
    "a",
    " ",
    "the the the thethe",
]
CONTROL, USER_DEFINED, UNKNOWN, NORMAL, BYTE = 3, 4, 2, 1, 6


def main() -> None:
    """Train on this repository's documents and write the vocabulary and the token ids."""
    prose = [
        line for name in ("README.md", "STYLE.md") for line in Path(name).read_text().split("\n")
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        num_threads=1,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(tokenizer.vocab_size())
    golden = {
        "tokens": [tokenizer.id_to_piece(i) for i in ids],
        "scores": [tokenizer.get_score(i) for i in ids],
        "types": [
            UNKNOWN
            if tokenizer.is_unknown(i)
            else CONTROL
            if tokenizer.is_control(i)
            else BYTE
            if tokenizer.is_byte(i)
            else NORMAL
            for i in ids
        ],
        "bos": tokenizer.bos_id(),
        "eos": tokenizer.eos_id(),
        "unknown": tokenizer.unk_id(),
        "cases": [{"text": text, "ids": tokenizer.encode(text)} for text in TEXTS],
    }
    Path(sys.argv[1]).write_text(json.dumps(golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
