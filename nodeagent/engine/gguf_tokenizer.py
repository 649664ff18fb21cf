"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE."""

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

from nodeagent.engine.checkpoint.gguf_header import Strings
from nodeagent.engine.models.shape import CheckpointError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "\u2581"
_PIECE_CHARS_MAX: Final = 256
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class GgufTokenizer:
    """The tokenizer, and the tokens that begin and end a text."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        kind = metadata.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise CheckpointError(
                f"cannot load {path}: tokenizer {kind!r}, byte-level BPE (gpt2) and SentencePiece"
                " (llama) are supported; use the model's Hugging Face folder"
            )
        self.byte_level = kind == "gpt2"
        self._tokens = self._strings("tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type") or []
        if not isinstance(types, list) or len(types) not in (0, len(self._tokens)):
            raise CheckpointError(
                f"cannot load {path}: token types {types!r:.100} for {len(self._tokens)} tokens"
            )
        self.special_ids = frozenset(at for at, type_ in enumerate(types) if type_ == _CONTROL)
        self.tokenizer = self._byte_level() if self.byte_level else self._sentencepiece()
        self._add(sorted(self.special_ids), special=True)
        self._add([at for at, type_ in enumerate(types) if type_ == _USER_DEFINED], special=False)
        self.bos = self._token_at(metadata.get("tokenizer.ggml.bos_token_id"))
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        self.eos, *_ = [self._token_at(token) for token in ends]
        self.stop_ids = frozenset(token for token in ends if token is not None)
        # SentencePiece's models expect their beginning unless told otherwise, others do not.
        expected = not self.byte_level or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
        if self.bos and metadata.get("tokenizer.ggml.add_bos_token", expected):
            self.tokenizer.post_processor = processors.TemplateProcessing(
                single=[self.bos, "$A"],
                special_tokens=[(self.bos, self.tokenizer.token_to_id(self.bos))],
            )

    def _byte_level(self) -> Tokenizer:
        kind = self._metadata.get("tokenizer.ggml.pre", "default")
        merges = [_pair(merge) for merge in self._strings("tokenizer.ggml.merges")]
        tokenizer = self._bpe(merges=merges, ignore_merges=kind == "llama-bpe")
        tokenizer.pre_tokenizer = _pre_tokenizer(self._path, kind)
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(self._tokens):
            raise CheckpointError(f"cannot load {self._path}: not a score for each token")
        unknown = self._token_at(self._metadata.get("tokenizer.ggml.unknown_token_id"))
        tokenizer = self._bpe(
            merges=_merges(self._tokens, scores),
            unk_token=unknown or None,
            fuse_unk=True,
            byte_fallback=True,
        )
        steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
        if self._metadata.get("tokenizer.ggml.add_space_prefix", True):
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

    def _bpe(self, **options: Any) -> Tokenizer:
        vocabulary = {token: number for number, token in enumerate(self._tokens)}
        if len(vocabulary) != len(self._tokens):
            raise CheckpointError(f"cannot load {self._path}: tokens are there twice")
        try:
            return Tokenizer(models.BPE(vocab=vocabulary, **options))
        # The tokenizers package raises bare Exception and TypeError for tables that do not agree.
        except Exception as error:
            raise CheckpointError(f"cannot load {self._path}: its tokenizer: {error}") from error

    def _add(self, ids: list[int], *, special: bool) -> None:
        added = [AddedToken(self._tokens[at], special=special, normalized=False) for at in ids]
        add = self.tokenizer.add_special_tokens if special else self.tokenizer.add_tokens
        add(added)

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, Strings) or not value.ends:
            raise CheckpointError(f"cannot load {self._path}: {key} is missing")
        return value.read()

    def _token_at(self, token: Any) -> str:
        if token is None:
            return ""
        if type(token) is not int or not 0 <= token < len(self._tokens):
            raise CheckpointError(f"cannot load {self._path}: token id {token!r} is out of range")
        return self._tokens[token]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


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


def _pre_tokenizer(path: Path, kind: Any) -> Any:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in ("default", "gpt-2"):
        return plain
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    patterns = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if not isinstance(kind, str) or kind not in patterns:
        raise CheckpointError(f"cannot load {path}: pre-tokenizer {kind!r} is unsupported")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[kind]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
