"""The vocabulary in a GGUF file's metadata: byte-level BPE, or the BPE of SentencePiece."""

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

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.tokenizer.hf_tokenizer import check_tokenizer, combine_templates
from nodeagent.engine.tokenizer.vocabulary import SENTENCEPIECE_SPACE, Vocabulary
from nodeagent.engine.weights.gguf_header import PackedStrings

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_END_TOKENS: Final = frozenset(
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
"""Special tokens that end an answer in every model that has them: many files name only one."""
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
_LLAMA_CPP_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
"""llama.cpp's default for a file without a pre-tokenizer name. No model was trained with it."""
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": _LLAMA_CPP_DEFAULT,
    **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (_LLAMA3,)),
    "smaug-bpe": (_LLAMA3,),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
}
"""Regular expressions that split text into words, by llama.cpp's name of the pre-tokenizer. Each
splits what the ones before it left whole."""
_WHOLE_WORDS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Pre-tokenizers whose models take a word that is a token whole, without merges, and expect BOS."""


def read_gguf_vocabulary(path: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Build the vocabulary from the metadata of the file at `path`, or raise CheckpointError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"cannot load {path}: tokenizer {kind!r}, byte-level BPE (gpt2) and SentencePiece"
            " (llama) are supported; use the model's Hugging Face folder"
        )
    byte_level, fields = kind == "gpt2", _TokenizerMetadata(path, metadata)
    tokens = fields.tokens
    types = metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise CheckpointError(
            f"cannot load {path}: token types {types!r:.100} for {len(tokens)} tokens"
        )
    tokenizer = _byte_level_bpe(fields) if byte_level else _sentencepiece_bpe(fields)
    special_ids = [token for token, type_ in enumerate(types) if type_ == _CONTROL]
    added = [tokens[token] for token, type_ in enumerate(types) if type_ == _USER_DEFINED]
    special = [AddedToken(tokens[token], special=True, normalized=False) for token in special_ids]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    bos = fields.token_text(metadata.get("tokenizer.ggml.bos_token_id"))
    # SentencePiece models expect BOS unless the file says otherwise; byte-level models do not.
    expected = not byte_level or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    if bos and metadata.get("tokenizer.ggml.add_bos_token", expected):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    check_tokenizer(path, tokenizer)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos, *_ = [fields.token_text(token) for token in ends]
    templates = [metadata.get(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use")]
    return Vocabulary(
        tokenizer=tokenizer,
        byte_level=byte_level,
        stop_ids=frozenset(token for token in ends if token is not None)
        | {token for token in special_ids if tokens[token] in _END_TOKENS},
        special_ids=frozenset(special_ids),
        chat_template=combine_templates(*templates),
        bos_token=bos,
        eos_token=eos,
    )


class _TokenizerMetadata:
    """Typed access to the tokenizer fields of a GGUF file's metadata."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens = self.strings("tokenizer.ggml.tokens")

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, PackedStrings) or not value.ends:
            raise CheckpointError(f"cannot load {self.path}: {key} is missing")
        return value.read()

    def token_text(self, token: Any) -> str:
        if token is None:
            return ""
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise CheckpointError(f"cannot load {self.path}: token id {token!r} is out of range")
        return self.tokens[token]

    def bpe(self, **options: Any) -> Tokenizer:
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise CheckpointError(f"cannot load {self.path}: a token is listed twice")
        try:
            return Tokenizer(models.BPE(vocab=vocabulary, **options))
        # The tokenizers package raises bare Exception and TypeError for inconsistent tables.
        except Exception as error:
            raise CheckpointError(f"cannot load {self.path}: its tokenizer: {error}") from error


def _byte_level_bpe(fields: _TokenizerMetadata) -> Tokenizer:
    kind = fields.metadata.get("tokenizer.ggml.pre", "default")
    pairs = map(str.partition, fields.strings("tokenizer.ggml.merges"), repeat(" "))
    merges = [(left, right) for left, _, right in pairs]
    if not isinstance(kind, str) or kind not in _SPLITS:
        raise CheckpointError(f"cannot load {fields.path}: pre-tokenizer {kind!r} is unsupported")
    tokenizer = fields.bpe(merges=merges, ignore_merges=kind in _WHOLE_WORDS)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[kind]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(fields: _TokenizerMetadata) -> Tokenizer:
    scores = fields.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(fields.tokens):
        raise CheckpointError(f"cannot load {fields.path}: not every token has a score")
    tokenizer = fields.bpe(
        merges=_merges(fields.tokens, scores),
        unk_token=fields.token_text(fields.metadata.get("tokenizer.ggml.unknown_token_id")) or None,
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [normalizers.Replace(" ", SENTENCEPIECE_SPACE)]
    if fields.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SENTENCEPIECE_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SENTENCEPIECE_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that produce each token, best score first.

    SentencePiece stores no merges: it joins two neighbours if their union is a token, and takes the
    union with the best score first.
    """
    known = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for number in sorted(range(len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        if len(token) > _PIECE_CHARS_MAX:
            continue
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [(left, right) for left, right in cuts if left in known and right in known]
        merges += sorted(halves, key=lambda pair: (known[pair[0]], known[pair[1]]))
    return merges
