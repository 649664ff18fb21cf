"""Streamed text: whole characters, and nothing of a stop string, however tokens split them."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from tests.unit.engine.byte_vocabulary import VOCABULARY


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=20))
def test_every_character_is_emitted_whole(text: str) -> None:
    decoder = StreamDetokenizer(VOCABULARY)
    pieces = [decoder.feed(byte) for byte in text.encode("utf-8", "ignore")]
    assert "".join(pieces) == text
    assert all(piece == "" or piece in text for piece in pieces)


def test_an_incomplete_last_character_and_special_tokens_give_no_text() -> None:
    decoder = StreamDetokenizer(VOCABULARY)
    tokens = [*"é".encode(), 256, *"😀".encode()[:3]]
    assert "".join(decoder.feed(token) for token in tokens) == "é"


def test_invalid_bytes_are_replaced_once_they_are_certainly_invalid() -> None:
    decoder = StreamDetokenizer(VOCABULARY)
    assert "".join(decoder.feed(token) for token in (0xF0, 0x41)) == "\ufffdA"


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_are_found_across_pieces_and_never_emitted(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopStrings(tuple(stops))
    emitted = ""
    fed = ""
    for piece in pieces:
        fed += piece
        emitted += matcher.feed(piece)
        if matcher.matched:
            break
    ends = [at for stop in stops if (at := fed.find(stop)) >= 0]
    assert bool(matcher.matched) == bool(ends)
    if ends:
        assert fed.find(matcher.matched) == min(ends)
        assert emitted == fed[: min(ends)]
    else:
        assert emitted + matcher.flush() == fed


def test_sentencepiece_tokens_spell_spaces_and_bytes() -> None:
    pieces = ["\u2581Hi", "\u2581you", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    vocabulary = Vocabulary(tokenizer, False, frozenset(), frozenset(), None, "", "")
    decoder = StreamDetokenizer(vocabulary)
    assert [decoder.feed(token) for token in range(4)] == ["Hi", " you", "", "é"]
    going_on = StreamDetokenizer(vocabulary, continues_text=True)
    assert [going_on.feed(token) for token in (1, 0)] == [" you", " Hi"]


def test_a_stop_string_before_min_tokens_is_text() -> None:
    matcher = StopStrings(("ab",))
    assert matcher.feed("xab", early=True) + matcher.feed("a", early=True) == "xaba"
    assert matcher.feed("b") == "b"
    assert not matcher.matched
    assert matcher.feed("cab") == "c"
    assert matcher.matched
