"""Captured decodes: which are, what they are given, and that they answer as steps do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.commands import Run, Told
from nodeagent.engine.kernels.cuda.batch_layout import host_numbers, sizes_of
from nodeagent.engine.kernels.cuda.capture import bucket_of, buckets, splits_of, why_not
from nodeagent.engine.kernels.cuda.graphs import Graphs
from nodeagent.engine.model.layers import attention
from nodeagent.engine.model.layers.lora import Adapter
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS
from tests.unit.engine.by_torch import ByTorch
from tests.unit.engine.tiny import SHAPE, llama

BLOCKS = 24


class Recorded:
    """Stands for CUDA's graphs: doing it again writes the answer where it first lay."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        answer = work()

        def replay() -> None:
            self.replays += 1
            answer.copy_(work())

        return replay, answer


def told(start: int, blocks: list[int], tokens: int = 1) -> Told:
    ids = [(7 * start + 3 * at + blocks[0]) % 257 for at in range(tokens)]
    return Told(blocks, start, tokens, ids, (), True)


def decodes(count: int, start: int) -> Run:
    """So many sequences of unlike lengths, each in blocks of its own."""
    return Run(
        tuple(told(start + row, [3 * row, 3 * row + 1, 3 * row + 2]) for row in range(count)), ()
    )


def prompts(count: int, tokens: int) -> Run:
    chunks = [told(0, [3 * row, 3 * row + 1, 3 * row + 2], tokens + row) for row in range(count)]
    return Run((), tuple(chunks))


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], Runner]:
    def runner(window: int | None) -> Runner:
        monkeypatch.setattr(attention, "page_kernels", lambda pages: ByTorch())
        shape = replace(SHAPE, window_tokens=window, context_tokens=512)
        return Runner(llama(1, shape), BLOCKS, "cpu", torch.float32)

    return runner


def graphs_of(runner: Runner, rows_max: int, blocks_max: int, window: int | None) -> Recorded:
    recorded = Recorded()
    runner.graphs = Graphs(runner._forward, recorded, "cpu", blocks_max, window)
    with torch.inference_mode():
        runner.graphs.capture(rows_max)
    return recorded


@pytest.mark.parametrize("window", [None, 9])
def test_steps_over_pages_answer_as_gathered_ones_do(
    paged: Callable[[int | None], Runner], monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    found = paged(window)
    recorded = graphs_of(found, 4, 3, window)
    monkeypatch.setattr(attention, "page_kernels", lambda pages: None)
    wanted = Runner(llama(1, replace(SHAPE, window_tokens=window)), BLOCKS, "cpu", torch.float32)
    mixed = Run((told(14, [0, 1, 2]),), (told(13, [3, 4, 5], 20),))
    for step in (prompts(5, 13), mixed, decodes(1, 20), decodes(3, 20), decodes(4, 30)):
        assert torch.allclose(found.run(step), wanted.run(step), atol=1e-4)
    assert recorded.replays == 3


def test_what_is_in_no_graph_runs_step_by_step(paged: Callable[[int | None], Runner]) -> None:
    runner = paged(None)
    recorded = graphs_of(runner, 2, 2, None)
    runner.run(prompts(4, 13))
    runner.run(decodes(3, 20))
    # Its seventeenth block has no place in a table of sixteen.
    runner.run(Run((told(16 * BLOCK_TOKENS - 1, list(range(17))),), ()))
    assert recorded.replays == 1
    recorded.replays = 0
    runner.run(Run((told(16 * BLOCK_TOKENS, list(range(17))),), ()))
    runner.run(Run((replace_samples(told(20, [0, 1])),), ()))
    assert recorded.replays == 0
    assert runner.run(decodes(2, 20)).shape == (2, SHAPE.vocabulary)
    assert recorded.replays == 1
    assert runner.graphs is not None
    runner.graphs.forget()
    runner.run(decodes(2, 21))
    assert recorded.replays == 1
    with torch.inference_mode():
        runner.graphs.capture(4)
    runner.run(decodes(3, 22))
    assert recorded.replays == 2
    assert runner.graphs.rows == (1, 2, 4)


def replace_samples(one: Told) -> Told:
    return Told(one.blocks, one.start, one.tokens, one.ids, one.drafts, False)


def test_an_adapter_is_in_no_graph(paged: Callable[[int | None], Runner]) -> None:
    class Decode:
        blocks, adapter = [0, 1], Adapter("a", {}, b"", 0)
        start, tokens, ids, drafts, samples = 20, 1, [5], (), True

    class Step:
        decodes = chunks = (Decode(),)
        segments = ()

    runner = paged(None)
    recorded = graphs_of(runner, 2, 2, None)
    runner.run(Step())
    assert recorded.replays == 0


def test_padding_writes_nothing(paged: Callable[[int | None], Runner]) -> None:
    runner = paged(None)
    runner.run(prompts(3, 13))
    before = [kv.pages.clone() for kv in runner._kv]
    graphs_of(runner, 4, 3, None)
    # Three rows in a graph of four: the blocks of nobody else change.
    runner.run(decodes(3, 20))
    for kv, old in zip(runner._kv, before, strict=True):
        changed = (kv.pages != old).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[1, 4], [4, 5], [7, 6]]


def test_a_step_is_one_piece_of_numbers() -> None:
    step = Run((told(17, [5, 9]), told(3, [2])), (told(15, [7, 8], 3),))
    sizes = sizes_of(step, 4)
    numbers = sizes.split(host_numbers(sizes, step, 4, pinned=False))
    assert numbers.positions.tolist() == [17, 3, 15, 16, 17]
    assert numbers.slots.tolist() == [9 * 16 + 1, 2 * 16 + 3, 7 * 16 + 15, 8 * 16, 8 * 16 + 1]
    assert numbers.sampled.tolist() == [0, 1, 4]
    # With a window of four, position 17 sees 14 to 17, which lie in both blocks.
    assert numbers.tables.shape == (2, 16)
    assert numbers.tables.tolist()[0][:2] == [5, 9]
    assert numbers.tables.tolist()[1][0] == 2
    assert numbers.spans.tolist() == [[14, 18], [0, 4]]
    assert numbers.places.tolist() == [[2, 3, 15]]
    assert numbers.chunk_tables[0, :2].tolist() == [7, 8]
    starts = [getattr(numbers, name).storage_offset() for name in numbers.__slots__]
    assert all(start % 2 == 0 for start in starts)


@pytest.mark.parametrize(
    ("rows_max", "captured"),
    [
        (1, (1,)),
        (3, (1, 2, 4)),
        (16, (1, 2, 4, 8, 16)),
        (40, (1, 2, 4, 8, 16, 32, 48)),
        (257, (1, 2, 4, 8, *range(16, 257, 16), 320)),
    ],
)
def test_buckets(rows_max: int, captured: tuple[int, ...]) -> None:
    assert buckets(rows_max) == captured


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600))
def test_every_step_up_to_the_limit_has_a_bucket(rows_max: int, rows: int) -> None:
    found = bucket_of(rows, buckets(rows_max))
    if rows > rows_max:
        assert found is None or found >= rows
        return
    assert found is not None and rows <= found <= max(2 * rows, rows + 63)
    assert bucket_of(0, buckets(rows_max)) is None


@pytest.mark.parametrize(
    ("rows", "context", "splits"),
    [(1, 8192, 32), (1, 256, 4), (4, 8192, 8), (33, 8192, 1), (256, 8192, 1), (1, 10, 1)],
)
def test_few_rows_are_split_to_fill_the_device(rows: int, context: int, splits: int) -> None:
    assert splits_of(rows, 8, context, 132, 64) == splits


def test_why_nothing_is_captured() -> None:
    sound = {"device": "cuda:0", "kernels": True, "experts": 0, "heard": False}
    assert why_not(**sound) == ""  # type: ignore[arg-type]
    for change in ({"device": "cpu"}, {"kernels": False}, {"experts": 8}, {"heard": True}):
        assert why_not(**{**sound, **change})  # type: ignore[arg-type]
    runner = Runner(llama(1), BLOCKS, "cpu", torch.float32)
    runner.capture(4, 64)
    assert runner.graphs is None
