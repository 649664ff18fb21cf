"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE."""

from itertools import repeat
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.tokenizer.vocabulary import Vocabulary, either_template, try_out
from nodeagent.engine.weights.gguf_header import Strings

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "\u2581"
_ENDS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "</s>",
    }
)
"""Special tokens that end an answer wherever there are any: many files name only one of theirs."""
_PIECE_CHARS_MAX: Final = 256
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_UNSAID: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
"""What llama.cpp takes for a file that does not say, which no model was trained with."""
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": _UNSAID,
    **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (_LLAMA3,)),
    "smaug-bpe": (_LLAMA3,),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
}
"""The expressions that cut a text into words, each what those before it left, by the names of
llama.cpp: one for each tokenizer that its converter has met, of which many are alike."""
_WHOLE_WORDS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Of these a word that is a token is one, whichever merges lead there; and they expect a BOS."""


def vocabulary_of_gguf(path: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Build the vocabulary that the metadata describes."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"cannot load {path}: tokenizer {kind!r}, byte-level BPE (gpt2) and SentencePiece"
            " (llama) are supported; use the model's Hugging Face folder"
        )
    byte_level, told = kind == "gpt2", _Told(path, metadata)
    tokens = told.tokens
    types = metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise CheckpointError(
            f"cannot load {path}: token types {types!r:.100} for {len(tokens)} tokens"
        )
    tokenizer = _byte_level(told) if byte_level else _sentencepiece(told)
    special_ids = [at for at, type_ in enumerate(types) if type_ == _CONTROL]
    added = [tokens[at] for at, type_ in enumerate(types) if type_ == _USER_DEFINED]
    special = [AddedToken(tokens[at], special=True, normalized=False) for at in special_ids]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    bos = told.token_at(metadata.get("tokenizer.ggml.bos_token_id"))
    # SentencePiece's models expect their beginning unless told otherwise, others do not.
    expected = not byte_level or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    if bos and metadata.get("tokenizer.ggml.add_bos_token", expected):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    try_out(path, tokenizer)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos, *_ = [told.token_at(token) for token in ends]
    templates = [metadata.get(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use")]
    return Vocabulary(
        tokenizer=tokenizer,
        byte_level=byte_level,
        stop_ids=frozenset(token for token in ends if token is not None)
        | {token for token in special_ids if tokens[token] in _ENDS},
        special_ids=frozenset(special_ids),
        chat_template=either_template(*templates),
        bos_token=bos,
        eos_token=eos,
    )


class _Told:
    """The metadata, with what several parts of a tokenizer need of it."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens = self.strings("tokenizer.ggml.tokens")

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, Strings) or not value.ends:
            raise CheckpointError(f"cannot load {self.path}: {key} is missing")
        return value.read()

    def token_at(self, token: Any) -> str:
        if token is None:
            return ""
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise CheckpointError(f"cannot load {self.path}: token id {token!r} is out of range")
        return self.tokens[token]

    def bpe(self, **options: Any) -> Tokenizer:
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise CheckpointError(f"cannot load {self.path}: tokens are there twice")
        try:
            return Tokenizer(models.BPE(vocab=vocabulary, **options))
        # The tokenizers package raises bare Exception and TypeError for tables that do not agree.
        except Exception as error:
            raise CheckpointError(f"cannot load {self.path}: its tokenizer: {error}") from error


def _byte_level(told: _Told) -> Tokenizer:
    kind = told.metadata.get("tokenizer.ggml.pre", "default")
    cut = map(str.partition, told.strings("tokenizer.ggml.merges"), repeat(" "))
    merges = [(left, right) for left, _, right in cut]
    if not isinstance(kind, str) or kind not in _SPLITS:
        raise CheckpointError(f"cannot load {told.path}: pre-tokenizer {kind!r} is unsupported")
    tokenizer = told.bpe(merges=merges, ignore_merges=kind in _WHOLE_WORDS)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[kind]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(told: _Told) -> Tokenizer:
    scores = told.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(told.tokens):
        raise CheckpointError(f"cannot load {told.path}: not a score for each token")
    tokenizer = told.bpe(
        merges=_merges(told.tokens, scores),
        unk_token=told.token_at(told.metadata.get("tokenizer.ggml.unknown_token_id")) or None,
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if told.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that lead to each token, best score first.

    SentencePiece keeps no merges: two neighbours join where their union is a token, the best first.
    """
    known = {token: at for at, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for at in sorted(range(len(tokens)), key=lambda at: -scores[at]):
        token = tokens[at]
        if len(token) > _PIECE_CHARS_MAX:
            continue
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [(left, right) for left, right in cuts if left in known and right in known]
        merges += sorted(halves, key=lambda pair: (known[pair[0]], known[pair[1]]))
    return merges
