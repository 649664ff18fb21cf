"""From a grammar to a constraint: compiled in threads of its own, within limits of work and time.

llguidance does it. Beside xgrammar, on SmolLM2's 49,152 tokens (ops/bench/constrain.md), masks cost
both well under a hundredth of a step, but xgrammar compiles for 5 to 460 ms what llguidance
compiles in 1 to 5, and every request here may bring its own schema. It also needs transformers and
Triton, where llguidance needs nothing.

Rule 1: the work of compiling and of each mask is bounded by fuel, not by a clock, so a hostile
grammar fails in words at the same place everywhere.
Rule 2: the first mask is computed here too: what allows no output at all is refused before it runs.
"""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.structured.constraint import Constraint, first_line
from nodeagent.engine.structured.grammar import Grammar, UnusableGrammar
from nodeagent.engine.tokenizer.vocabulary import Vocabulary

COMPILE_S: Final = 5.0
_THREADS: Final = 2


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, compile_s: float = COMPILE_S) -> None:
        self._vocabulary = vocabulary
        self._compile_s = compile_s
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")

    async def compile(self, grammar: Grammar) -> Constraint:
        """Compile `grammar`, or raise ApiError saying why it cannot be used."""
        work = self._threads.submit(self.build, grammar)
        try:
            async with asyncio.timeout(self._compile_s):
                return await asyncio.wrap_future(work)
        except UnusableGrammar as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param=grammar.param) from error
        except TimeoutError as error:
            if work.running():
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"cannot use {grammar.param}: it does not compile in {self._compile_s:g} s",
                    param=grammar.param,
                ) from error
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot compile {grammar.param} now: others are before it",
                retry_after_s=1.0,
            ) from error

    def build(self, grammar: Grammar) -> Constraint:
        """Compile `grammar` in this thread, or raise UnusableGrammar."""
        if not self._vocabulary.stop_ids:
            raise UnusableGrammar(f"cannot use {grammar.param}: no token of this model ends a text")
        tokenizer = self._prepared()
        matcher = LLMatcher(tokenizer, grammar.lark, log_level=0, limits=_limits())
        # An error of either call stays in the matcher.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UnusableGrammar(f"cannot use {grammar.param}: {_in_words(matcher.get_error())}")
        return Constraint(matcher, self._vocabulary.size, tokenizer.eos_token)

    def close(self) -> None:
        """Let no compilation begin any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepared(self) -> LLTokenizer:
        """Return the vocabulary as llguidance wants it: a trie, built in a third of a second."""
        with self._building:
            if self._tokenizer is None:
                described = _Described(self._vocabulary)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(described),
                    n_vocab=self._vocabulary.size,
                    eos_token=described.stop_ids,
                )
            return self._tokenizer


class _Described:
    """The vocabulary by the names that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        end = vocabulary.tokenizer.token_to_id(vocabulary.eos_token)
        # The model's own end first: it is what a finished output is drafted to end with.
        self.stop_ids = sorted(vocabulary.stop_ids, key=lambda token: (token != end, token))
        self.eos_token_id = self.stop_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids)
        name = vocabulary.tokenizer.id_to_token
        self.tokens = [
            (name(token) or "").encode()
            if token in vocabulary.special_ids
            else vocabulary.token_bytes(token)
            for token in range(vocabulary.size)
        ]
        plain = [token for token in range(vocabulary.size) if token not in vocabulary.special_ids]
        self._of_byte = {
            self.tokens[token][0]: token for token in plain if len(self.tokens[token]) == 1
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenise what a grammar leaves no choice about, as the model would have."""
        raw = text if isinstance(text, bytes) else text.encode()
        # SentencePiece puts a space before a text's first word; not after this mark.
        mark = "" if self._vocabulary.byte_level else "\x02"
        tokens = self._vocabulary.encode(mark + raw.decode(errors="replace"), special=False)
        spelled = [self.tokens[token] for token in tokens]
        while spelled and mark and b"".join(spelled) != raw:
            spelled.pop(0)
        if b"".join(spelled) == raw:
            return tokens[len(tokens) - len(spelled) :]
        # A normaliser changed it, or it is half a character: byte by byte it is always exact.
        return [self._of_byte[byte] for byte in raw if byte in self._of_byte]


def _limits() -> LLParserLimits:
    # A mask may take 200,000 units of a lexer's work, 15 to 30 ms; building the lexer as many, a
    # tenth of a second. A lexer's state takes 2 kB.
    return LLParserLimits(
        max_items_in_row=5_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _in_words(error: str) -> str:
    if error.startswith("NoExtension"):
        return "no output can satisfy it"
    # A regex's error is drawn over several lines; the one that begins so says what is wrong.
    found = re.search(r"^error: (.{1,300})", error, re.MULTILINE)
    if found:
        return found.group(1)
    plain = error.replace("failed to compile JSON schema: ", "")
    return first_line(re.sub(r"^at \d+\(\d+\): ", "", plain))
