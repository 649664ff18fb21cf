"""The loops over a body in C find and hash exactly what those in Python do."""

import base64
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http import body_loops
from isochrone.wire.http.body_loops import (
    BRACKETS_FEW,
    LONE_SURROGATE,
    MANY_BRACKETS,
    MANY_QUOTES,
    NOT_ASCII,
    QUOTES_FEW,
    hash_in_python,
    scan_in_python,
)
from router.decide.caches.prefix_index import block_ends
from tests.c_module import compile_now

SOURCE = Path(body_loops.__file__).with_name("body_bytes.c")
BRACKETS = (b"[", b"{" * 30, b"]")
ESCAPES = (b"\\", b"u", b"\\ud8", b"\\uDFff", b"\\uDbF", b"\\ud7ff", b"\\n", b"\\ud83D\\uDe00")
PIECES = st.sampled_from([*BRACKETS, *ESCAPES, b"\xc3\xa9", b"x" * 13, b'"', b"\0"])
SEEDS = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


@given(st.lists(PIECES, max_size=30).map(b"".join), st.integers(0, 130))
def test_a_scan_in_c_finds_what_one_in_python_finds(
    in_c: ModuleType, body: bytes, before: int
) -> None:
    body = b" " * before + body
    assert in_c.scan_body(body) == scan_in_python(body)


@pytest.mark.parametrize("size", [*range(16), 63, 64, 65, 127, 128, 129])
def test_each_position_of_a_body_is_looked_at(in_c: ModuleType, size: int) -> None:
    for at in range(size):
        body = bytearray(b"x" * size)
        body[at] = 0x80
        assert in_c.scan_body(bytes(body)) == NOT_ASCII
        body[at : at + 4] = b"\\uDb"[: size - at]
        whole = LONE_SURROGATE if at + 4 <= size else 0
        assert in_c.scan_body(bytes(body)) == scan_in_python(bytes(body)) == whole
    for count, found in ((BRACKETS_FEW, 0), (BRACKETS_FEW + 1, MANY_BRACKETS)):
        assert in_c.scan_body(b"x" * size + b"[" * count) == found


def test_whole_surrogate_pairs_are_told_from_lone_ones(in_c: ModuleType) -> None:
    """Where they were not, a search in Python stalled a router for 170 ms, for 8 MiB of pairs."""
    pairs = b'"' + b"\\ud83d\\ude00" * 10_000 + b'"'
    assert in_c.scan_body(pairs) == 0
    assert in_c.scan_body(pairs[:-7]) == LONE_SURROGATE


@pytest.mark.parametrize("apart", [1, 3, 64])
def test_quotes_are_counted_up_to_the_limit(in_c: ModuleType, apart: int) -> None:
    """In C, because counting them in an image of 1 MiB took a millisecond in Python."""
    few = (b'"' + b"x" * (apart - 1)) * QUOTES_FEW
    for body, found in ((few, 0), (few + b'"', MANY_QUOTES), (b'x"' + few, MANY_QUOTES)):
        assert in_c.scan_body(body) == scan_in_python(body) == found


# One drawn number gives the bytes: hypothesis takes seconds to draw thousands of them one by one.
@given(st.integers(0, 5000), SEEDS, SEEDS)
def test_prompts_have_the_same_hashes_in_c(
    in_c: ModuleType, size: int, seed: int, content: int
) -> None:
    prompt = Random(content).randbytes(size)
    ends = block_ends(size)
    hashes = in_c.chained_hashes(prompt, ends, seed)
    assert list(hashes) == hash_in_python(prompt, ends, seed)
    assert len(hashes) == len(ends) and bool(hashes) == bool(ends)
    assert list(memoryview(hashes).cast("Q")) == list(hashes)
    if size > 240:
        [only] = in_c.chained_hashes(prompt, (size,), seed)
        assert only == xxhash.xxh3_64_intdigest(prompt, seed)


def test_a_long_prompt_has_the_same_hashes_in_c(in_c: ModuleType) -> None:
    prompt = bytes(range(251)) * 4_000
    ends = block_ends(len(prompt))
    hashes = in_c.chained_hashes(prompt, ends, 0)
    assert list(hashes) == hash_in_python(prompt, ends, 0) and hashes[-1] == list(hashes)[-1]
    for index in (len(ends), -len(ends) - 1):
        with pytest.raises(IndexError):
            hashes[index]
    with pytest.raises(TypeError):
        memoryview(hashes)[0] = 1
    with pytest.raises(TypeError):
        type(hashes)()


@given(st.text("AZaz09+/=!-_ \x80\u0100@[`{:", max_size=70), st.integers(0, 3), st.integers(0, 2))
def test_what_is_surely_base64_is_decoded_strictly(
    in_c: ModuleType, text: str, begin: int, padding: int
) -> None:
    for data in (text, text.translate({ord(other): "B" for other in "=!-_ \x80\u0100@[`{:"})):
        url = "!" * begin + data + "=" * padding
        try:
            decoded = base64.b64decode(url[begin:], validate=True)
        except ValueError:
            decoded = b""
        assert decoded or not in_c.is_surely_base64(url, begin)


@given(st.binary(max_size=100), st.integers(0, 20))
def test_what_is_encoded_is_surely_base64(in_c: ModuleType, data: bytes, begin: int) -> None:
    url = "!" * begin + base64.b64encode(data).decode()
    assert in_c.is_surely_base64(url, begin) == bool(data)


def test_c_refuses_what_it_cannot_read(in_c: ModuleType) -> None:
    with pytest.raises(TypeError):
        in_c.scan_body("text")
    with pytest.raises(TypeError):
        in_c.chained_hashes(b"x" * 128, 128, 0)
    with pytest.raises(TypeError):
        in_c.is_surely_base64(b"AAAA", 0)
    assert not in_c.is_surely_base64("AAAA", -1) and not in_c.is_surely_base64("AAAA", 5)
    with pytest.raises(TypeError):
        in_c.chained_hashes(b"x" * 128, ["128"], 0)
    with pytest.raises(OverflowError):
        in_c.chained_hashes(b"x" * 128, [128], -1)
    for ends in ([129], [127], [128, 256], [-128], [256, 128], [2**62]):
        with pytest.raises(ValueError, match="block"):
            in_c.chained_hashes(b"x" * 128, ends, 0)
