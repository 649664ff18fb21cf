"""Decode graphs: which steps they serve, what they are given, and that logits are the same."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels import selection
from nodeagent.engine.kernels.cuda.batch_layout import step_sizes, write_step
from nodeagent.engine.kernels.cuda.decode_graphs import DecodeGraphs
from nodeagent.engine.kernels.cuda.graph_buckets import (
    bucket_of,
    graph_buckets,
    why_no_graphs,
)
from nodeagent.engine.kernels.cuda.triton_kernels import splits_of
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.workers.commands import ChunkCommand, RunStep
from tests.unit.engine.by_torch import ByTorch
from tests.unit.engine.tiny import SHAPE, llama

BLOCKS = 24


class Recorded:
    """Replaces CUDA graphs: a replay writes the result to the tensor of the first run."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        answer = work()

        def replay() -> None:
            self.replays += 1
            answer.copy_(work())

        return replay, answer


def told(start: int, blocks: list[int], tokens: int = 1) -> ChunkCommand:
    ids = [(7 * start + 3 * at + blocks[0]) % 257 for at in range(tokens)]
    return ChunkCommand(blocks, start, tokens, ids, (), True)


def decodes(count: int, start: int) -> RunStep:
    """`count` decodes of sequences of different lengths, each in blocks of its own."""
    return RunStep(
        tuple(told(start + row, [3 * row, 3 * row + 1, 3 * row + 2]) for row in range(count)), ()
    )


def prompts(count: int, tokens: int) -> RunStep:
    chunks = [told(0, [3 * row, 3 * row + 1, 3 * row + 2], tokens + row) for row in range(count)]
    return RunStep((), tuple(chunks))


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], ModelRunner]:
    def runner(window: int | None) -> ModelRunner:
        monkeypatch.setattr(selection, "paged_kernels", lambda device, kv_dtype: ByTorch())
        shape = replace(SHAPE, window_tokens=window, context_tokens=512)
        return ModelRunner(llama(1, shape), BLOCKS, "cpu", torch.float32)

    return runner


def graphs_of(runner: ModelRunner, rows_max: int, blocks_max: int, window: int | None) -> Recorded:
    recorded = Recorded()
    runner.graphs = DecodeGraphs(runner._forward, recorded, "cpu", blocks_max, window)
    with torch.inference_mode():
        runner.graphs.capture(rows_max)
    return recorded


@pytest.mark.parametrize("window", [None, 9])
def test_paged_steps_and_graphs_equal_torch(
    paged: Callable[[int | None], ModelRunner], monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    found = paged(window)
    recorded = graphs_of(found, 4, 3, window)
    monkeypatch.setattr(selection, "paged_kernels", lambda device, kv_dtype: None)
    wanted = ModelRunner(
        llama(1, replace(SHAPE, window_tokens=window)), BLOCKS, "cpu", torch.float32
    )
    mixed = RunStep((told(14, [0, 1, 2]),), (told(13, [3, 4, 5], 20),))
    for step in (prompts(5, 13), mixed, decodes(1, 20), decodes(3, 20), decodes(4, 30)):
        assert torch.allclose(found.run(step), wanted.run(step), atol=1e-4)
    assert recorded.replays == 3


def test_a_step_that_fits_no_graph_runs_without(paged: Callable[[int | None], ModelRunner]) -> None:
    runner = paged(None)
    recorded = graphs_of(runner, 2, 2, None)
    runner.run(prompts(4, 13))
    runner.run(decodes(3, 20))
    # A seventeenth block does not fit into a table of sixteen.
    runner.run(RunStep((told(16 * BLOCK_TOKENS - 1, list(range(17))),), ()))
    assert recorded.replays == 1
    recorded.replays = 0
    runner.run(RunStep((told(16 * BLOCK_TOKENS, list(range(17))),), ()))
    runner.run(RunStep((replace_samples(told(20, [0, 1])),), ()))
    assert recorded.replays == 0
    assert runner.run(decodes(2, 20)).shape == (2, SHAPE.vocabulary)
    assert recorded.replays == 1
    assert runner.graphs is not None
    with torch.inference_mode():
        runner.graphs.capture(4)
    runner.run(decodes(3, 22))
    assert recorded.replays == 2
    assert runner.graphs.rows == (1, 2, 4)


def replace_samples(one: ChunkCommand) -> ChunkCommand:
    return ChunkCommand(one.blocks, one.start, one.tokens, one.ids, one.drafts, False)


def test_a_step_with_an_adapter_runs_without_graphs(
    paged: Callable[[int | None], ModelRunner],
) -> None:
    class Decode:
        blocks, adapter = [0, 1], LoraAdapter("a", {}, b"", 0)
        start, tokens, ids, drafts, samples = 20, 1, [5], (), True

    class Step:
        decodes = chunks = (Decode(),)
        segments = ()

    runner = paged(None)
    recorded = graphs_of(runner, 2, 2, None)
    runner.run(Step())
    assert recorded.replays == 0


def test_padding_rows_write_nothing(paged: Callable[[int | None], ModelRunner]) -> None:
    runner = paged(None)
    runner.run(prompts(3, 13))
    before = [kv.pages.clone() for kv in runner._kv]
    graphs_of(runner, 4, 3, None)
    # Three rows in a graph of four: only their own slots change.
    runner.run(decodes(3, 20))
    for kv, old in zip(runner._kv, before, strict=True):
        changed = (kv.pages != old).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[1, 4], [4, 5], [7, 6]]


def test_a_step_is_written_into_one_buffer() -> None:
    step = RunStep((told(17, [5, 9]), told(3, [2])), (told(15, [7, 8], 3),))
    sizes = step_sizes(step, 4)
    numbers = sizes.split(write_step(sizes, step, 4, pinned=False))
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
    assert graph_buckets(rows_max) == captured


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600))
def test_every_row_count_up_to_the_limit_has_a_bucket(rows_max: int, rows: int) -> None:
    found = bucket_of(rows, graph_buckets(rows_max))
    if rows > rows_max:
        assert found is None or found >= rows
        return
    assert found is not None and rows <= found <= max(2 * rows, rows + 63)
    assert bucket_of(0, graph_buckets(rows_max)) is None


@pytest.mark.parametrize(
    ("rows", "context", "splits"),
    [(1, 8192, 32), (1, 256, 4), (4, 8192, 8), (33, 8192, 1), (256, 8192, 1), (1, 10, 1)],
)
def test_few_decodes_are_split_to_fill_the_device(rows: int, context: int, splits: int) -> None:
    assert splits_of(rows, 8, context, 132, 64) == splits


def test_why_a_model_has_no_graphs() -> None:
    sound = {"device": "cuda:0", "paged_kernels": True, "experts": 0, "records_states": False}
    assert why_no_graphs(**sound) == ""  # type: ignore[arg-type]
    for change in (
        {"device": "cpu"},
        {"paged_kernels": False},
        {"experts": 8},
        {"records_states": True},
    ):
        assert why_no_graphs(**{**sound, **change})  # type: ignore[arg-type]
    runner = ModelRunner(llama(1), BLOCKS, "cpu", torch.float32)
    runner.capture(4, 64)
    assert runner.graphs is None
