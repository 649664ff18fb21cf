"""A vocabulary with one token per byte, for tests that need no model."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nodeagent.engine.structured.constraint import Constraint, ConstraintError
from nodeagent.engine.tokenizer.vocabulary import _BYTE_OF_LETTER, Vocabulary

LETTERS = {byte: letter for letter, byte in _BYTE_OF_LETTER.items()}


def byte_vocabulary(*marks: str) -> Vocabulary:
    """One token for each byte, and special ones: the end and `marks`."""
    special = ("<end>", *marks)
    vocabulary = {LETTERS[byte]: byte for byte in range(256)}
    vocabulary |= {mark: 256 + at for at, mark in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return Vocabulary(
        tokenizer=tokenizer,
        byte_level=True,
        stop_ids=frozenset({256}),
        special_ids=frozenset(range(256, 256 + len(special))),
        chat_template=None,
        bos_token="",
        eos_token="<end>",
    )


VOCABULARY = byte_vocabulary()


def accepts(constraint: Constraint, tokens: Iterable[int]) -> bool:
    """Advance a constraint; return whether it takes all of `tokens`."""
    try:
        for token in tokens:
            constraint.accept(token)
    except ConstraintError:
        return False
    return True
