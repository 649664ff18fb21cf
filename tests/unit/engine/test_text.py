"""Text comes out whole: no half character, nothing of a stop string, whatever the token cuts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.server.request_body import messages_of, read_chat, wishes_of
from nodeagent.engine.tokenizer.chat_template import ChatTemplate, UnusableChat
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from nodeagent.engine.tokenizer.vocabulary import _BYTE_OF_LETTER, SEAM, Vocabulary

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


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=20))
def test_every_character_comes_out_whole(text: str) -> None:
    decoder = TokenText(VOCABULARY)
    pieces = [decoder.feed(byte) for byte in text.encode("utf-8", "ignore")]
    assert "".join(pieces) == text
    assert all(piece == "" or piece in text for piece in pieces)


def test_a_character_cut_by_the_end_is_dropped_and_special_tokens_say_nothing() -> None:
    decoder = TokenText(VOCABULARY)
    tokens = [*"é".encode(), 256, *"😀".encode()[:3]]
    assert "".join(decoder.feed(token) for token in tokens) == "é"


def test_bytes_that_are_no_character_are_replaced_once_that_is_sure() -> None:
    decoder = TokenText(VOCABULARY)
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
    assert matcher.matched == bool(ends)
    if ends:
        assert emitted == fed[: min(ends)]
    else:
        assert emitted + matcher.flush() == fed


def test_a_template_is_kept_in_its_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", "", "")
    with pytest.raises(UnusableChat):
        template.render([])
    with pytest.raises(UnusableChat, match="no system prompt"):
        ChatTemplate("{{ raise_exception('no system prompt') }}", "", "").render([])
    with pytest.raises(CheckpointError, match="cannot compile"):
        ChatTemplate("{% for %}", "", "")
    with pytest.raises(CheckpointError, match="cannot compile"):
        ChatTemplate("", "", "", ["x" * 100_000])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}b", "a1b"),
        ("{{ documents is none }}{{ tools is none }}", "TrueTrue"),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True) }}", '{"b": "\\u00e9", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(separators=(',', ':'), sort_keys=True) }}", '{"a":1,"b":2}'),
        ("{{ messages[0].reasoning_content }}", "hm"),
        ("{{ enable_thinking }}{{ reasoning_effort }}{{ add_generation_prompt }}", "FalselowTrue"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    ],
)
def test_a_template_finds_what_transformers_gives_it(source: str, text: str) -> None:
    kwargs = {"enable_thinking": False, "add_generation_prompt": False}
    message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    body = {"messages": [message], "reasoning_effort": "low", "chat_template_kwargs": kwargs}
    chat = read_chat(json.dumps(body).encode(), 10_000)
    assert ChatTemplate(source, "", "").render(messages_of(chat), (), wishes_of(chat)) == text


@given(st.text("<end>|a", max_size=12), st.sampled_from(["{{ x }}", "{{ x | tojson }}"]))
def test_a_client_cannot_write_a_special_token(text: str, shown: str) -> None:
    special = ["<end>", "><", "nd>|", "|a|a"]
    source = "<end>{{ messages[0].content }}" + shown
    rendered = ChatTemplate(source, "", "", special).render(
        [{"role": "user", "content": text}], (), {"x": {text: [text]}}
    )
    assert rendered.startswith("<end>")
    parts = rendered.removeprefix("<end>").split(SEAM)
    assert not any(mark in part for mark in special for part in parts)
    assert "".join(parts).startswith(text)
    tokens = VOCABULARY.encode(rendered, special=False)
    assert tokens.count(256) == 1
    assert b"".join(map(VOCABULARY.token_bytes, tokens)).decode() == "".join(parts)


def test_sentencepiece_tokens_spell_spaces_and_bytes() -> None:
    pieces = ["\u2581Hi", "\u2581you", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    vocabulary = Vocabulary(tokenizer, False, frozenset(), frozenset(), None, "", "")
    decoder = TokenText(vocabulary)
    assert [decoder.feed(token) for token in range(4)] == ["Hi", " you", "", "é"]
    going_on = TokenText(vocabulary, goes_on=True)
    assert [going_on.feed(token) for token in (1, 0)] == [" you", " Hi"]


def test_a_stop_string_that_begins_too_early_is_text() -> None:
    matcher = StopStrings(("ab",))
    assert matcher.feed("xab", early=True) + matcher.feed("a", early=True) == "xaba"
    assert matcher.feed("b") == "b"
    assert not matcher.matched
    assert matcher.feed("cab") == "c"
    assert matcher.matched
