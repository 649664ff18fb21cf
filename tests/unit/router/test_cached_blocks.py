"""The blocks of a cache in C behave exactly as those in Python, and both as their Protocol says."""

import gc
import importlib.util
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.caches import cached_blocks
from router.decide.caches.cached_blocks import BlocksInPython, CachedBlocks, PromptUse
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router/decide/caches/block_table.c"
KEYS = st.sampled_from([0, 1, 2, 3, 5, 2**63, 2**64 - 1, *range(1 << 20, 101 << 20, 1 << 20)])
PROMPTS = st.lists(KEYS, max_size=80)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), PROMPTS),
        st.tuples(st.just("remove"), PROMPTS),
        st.tuples(st.just("oldest"), st.just([0])),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


def ends_of(keys: list[int]) -> list[int]:
    """Return where blocks of different sizes end."""
    ends, end = [], 0
    for key in keys:
        end += 1 + key % 7
        ends.append(end)
    return ends


@given(OPERATIONS, PROMPTS)
def test_blocks_in_c_are_used_and_removed_as_in_python(
    in_c: ModuleType, operations: list[tuple[str, list[int]]], prompt: list[int]
) -> None:
    both: list[CachedBlocks] = [BlocksInPython(), in_c.BlockTable()]
    for now_s, (name, keys) in enumerate(operations):
        use = PromptUse(float(now_s))
        seen = []
        for blocks in both:
            used: tuple[list[int], int, int] | None = None
            if name == "use":
                is_buffer = blocks is both[1] and now_s % 2
                given: Any = array("Q", keys) if is_buffer else keys
                used = blocks.use(given, ends_of(keys), use)
            elif name == "oldest" and (oldest := blocks.oldest()) is not None:
                blocks.remove(oldest)
            elif name == "remove":
                for key in set(keys):
                    if key in blocks:
                        blocks.remove(key)
            held = blocks.oldest_first()
            assert len(blocks) == len(held) and (blocks.oldest() is None) == (not held)
            assert blocks.oldest_use() is (blocks.use_of(held[0]) if held else None)
            seen.append(
                (
                    *(used, blocks.size, blocks.inserted, held),
                    [blocks.use_of(key).sent_at_s for key in held],
                    blocks.sent_before(now_s / 2),
                    [key in blocks for key in prompt],
                )
            )
        assert seen[0] == seen[1]


@pytest.fixture(params=["python", "c"])
def new_blocks(request: pytest.FixtureRequest, in_c: ModuleType) -> Callable[[], CachedBlocks]:
    return BlocksInPython if request.param == "python" else in_c.BlockTable


def test_the_end_of_a_prompt_is_used_before_its_beginning(
    new_blocks: Callable[[], CachedBlocks],
) -> None:
    blocks = new_blocks()
    first, second = PromptUse(1.0), PromptUse(2.0)
    assert blocks.use([1, 2, 3], [10, 30, 60], first) == ([3, 2, 1], -1, 0)
    assert blocks.use((1, 2, 4), (10, 30, 40), second) == ([4], 1, 60 - 50)
    assert blocks.oldest_first() == [3, 4, 2, 1]
    assert (blocks.size, blocks.inserted, len(blocks)) == (70, 70, 4)
    assert blocks.use([], [], PromptUse(2.0)) == ([], -1, 0)
    assert blocks.use_of(1) is second and blocks.use_of(3) is first
    assert blocks.sent_before(2.0) == [3] and blocks.sent_before(3.0) == [3, 4, 2, 1]
    blocks.remove(4)
    assert (blocks.size, blocks.inserted, 4 in blocks) == (60, 70, False)
    # Block 3 was used last when 30 were inserted.
    assert blocks.use([9, 3], [5, 9], PromptUse(3.0)) == ([9], 1, 70 - 30)
    for method in (blocks.remove, blocks.use_of):
        with pytest.raises(KeyError):
            method(4)


def test_many_blocks_are_found_again(new_blocks: Callable[[], CachedBlocks]) -> None:
    blocks, use = new_blocks(), PromptUse(0.0)
    keys = [number << 40 for number in range(5_000)]
    blocks.use(keys, ends_of(keys), use)
    for key in keys[::3]:
        blocks.remove(key)
    left = [key for number, key in enumerate(keys) if number % 3]
    assert blocks.oldest_first() == left[::-1] and all(key in blocks for key in left)
    assert not any(key in blocks for key in keys[::3])


class _TrackedUse:
    """A use that can be seen to be freed. The compiled PromptUse can be neither watched nor
    inherited from."""


def test_blocks_in_c_free_what_they_hold(in_c: ModuleType) -> None:
    blocks = in_c.BlockTable()
    uses = [_TrackedUse() for _ in range(3)]
    alive = [weakref.ref(use) for use in uses]
    blocks.use([1, 2], [1, 2], uses[0])
    blocks.use([1, 2], [1, 2], uses[1])
    blocks.use([3], [1], uses[2])
    uses.clear()
    gc.collect()
    assert [use() is not None for use in alive] == [False, True, True]
    blocks.remove(3)
    assert alive[2]() is None
    del blocks
    assert alive[1]() is None


def test_c_refuses_what_it_cannot_read(in_c: ModuleType) -> None:
    blocks, use = in_c.BlockTable(), PromptUse(0.0)
    for arguments in ((), ([1], [1]), (1, [1], use), ([1], 1, use), (["1"], [1], use)):
        with pytest.raises(TypeError):
            blocks.use(*arguments)
    with pytest.raises(ValueError, match="ends"):
        blocks.use([1, 2], [1], use)
    with pytest.raises(OverflowError):
        blocks.use([-1], [1], use)
    with pytest.raises(ValueError, match="ends"):
        blocks.use(bytes(15), [1, 2], use)
    for method in (blocks.remove, blocks.use_of, blocks.sent_before):
        with pytest.raises(TypeError):
            method("1")
    with pytest.raises(TypeError):
        in_c.BlockTable(1)
    assert len(blocks) == 0 and blocks.oldest_first() == []
    blocks.use([1], [1], object())
    with pytest.raises(AttributeError):
        blocks.sent_before(1.0)


def test_the_compiled_path_uses_the_blocks_in_c() -> None:
    is_in_c = cached_blocks.new_cached_blocks is not BlocksInPython
    assert is_in_c == (importlib.util.find_spec("router.decide.caches.block_table") is not None)
