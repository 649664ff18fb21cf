"""The engine step with a scripted model: how generations end, and that blocks are released."""

from collections.abc import Callable

import torch
from torch import Tensor

from nodeagent.engine.core.generation import Generation, GenerationDelta
from nodeagent.engine.core.kv_transfers import OutgoingBlocks
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batch import Batch, BlockCopy, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from tests.unit.engine.byte_vocabulary import VOCABULARY
from tests.unit.engine.test_kv_transfers import Memory

END = 256
NAN = -1


class Script:
    """A model that samples the scripted tokens of each sequence, by number."""

    def __init__(self, lines: dict[int, list[int]]) -> None:
        self.lines = lines
        self.cleared: list[int] = []
        self.copied: list[BlockCopy] = []

    def clear(self, blocks: list[int]) -> None:
        self.cleared += blocks

    def copy(self, copies: list[BlockCopy]) -> None:
        self.copied += copies

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        rows = []
        for chunk in batch.chunks:
            if chunk.samples:
                token = self.lines[chunk.sequence.number][chunk.sequence.output_tokens]
                row = torch.zeros(257)
                row[token] = torch.nan if token == NAN else 1.0
                rows.append(row)
        logits = torch.stack(rows) if rows else torch.zeros(0, 257)
        return lambda: logits


def engine_of(lines: dict[int, list[int]]) -> EngineCore:
    return EngineCore(Script(lines), BatchScheduler(StepLimits(16, 4), BlockPool(16)))  # type: ignore[arg-type]


def generation(number: int, tokens_max: int = 50, stops: tuple[str, ...] = ()) -> Generation:
    return Generation(
        Sequence(number, [65] * 20, StopConditions(tokens_max, frozenset({END}))),
        Sampler(SamplingParams(temperature=0), []),
        StreamDetokenizer(VOCABULARY),
        StopStrings(stops),
    )


def run(engine: EngineCore) -> dict[int, list[GenerationDelta]]:
    deltas_of: dict[int, list[GenerationDelta]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas_of.setdefault(delta.number, []).append(delta)
    assert engine.scheduler.pool.used_blocks == 0
    return deltas_of


def text(deltas: list[GenerationDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_generations_end_for_different_reasons_without_affecting_others() -> None:
    engine = engine_of(
        {
            1: [*b"hello", END],
            2: [*"h\u00e9llo".encode()],
            3: [*b"a stop b"],
            4: [*b"ok", NAN],
        }
    )
    engine.submit(generation(1))
    engine.submit(generation(2, 4))
    engine.submit(generation(3, stops=("sto",)))
    engine.submit(generation(4))
    deltas_of = run(engine)
    assert [deltas_of[n][-1].finish for n in (1, 2, 3, 4)] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.ERROR,
    ]
    assert [text(deltas_of[n]) for n in (1, 2, 3, 4)] == ["hello", "h\u00e9l", "a ", "ok"]
    assert deltas_of[1][-1].output_tokens == 5
    assert deltas_of[4][-1].error.startswith("cannot sample")
    assert all(delta.finish is None for deltas in deltas_of.values() for delta in deltas[:-1])
    assert engine.output_tokens_total == 5 + 4 + 5 + 2
    # NaN must not spread to the sequence that gets the blocks next.
    assert engine._executor.cleared  # type: ignore[attr-defined]


def test_forks_sample_from_the_last_row_of_the_prompt_and_end_independently() -> None:
    engine = engine_of({1: [*b"ab", END], 2: [*b"aXY", END], 3: [*b"aZ"]})
    first = generation(1)
    first.forks = (generation(2), generation(3, 2))
    engine.submit(first)
    deltas_of = run(engine)
    assert [text(deltas_of[number]) for number in (1, 2, 3)] == ["ab", "aXY", "aZ"]
    assert [deltas_of[n][-1].finish for n in (1, 2, 3)] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert engine.prompt_tokens_total == 20
    assert engine.output_tokens_total == 2 + 3 + 2


def test_all_forks_of_a_prompt_with_nan_end_and_their_blocks_are_cleared() -> None:
    engine = engine_of({1: [NAN], 2: []})
    first = generation(1)
    first.forks = (generation(2),)
    engine.submit(first)
    deltas_of = run(engine)
    assert [deltas_of[number][-1].finish for number in (1, 2)] == [
        FinishReason.ERROR,
        FinishReason.ERROR,
    ]
    assert len(engine._executor.cleared) == 2  # type: ignore[attr-defined]
    assert not engine.scheduler.pool.cached_blocks()


def engine_with_transfers(lines: dict[int, list[int]]) -> EngineCore:
    pool = BlockPool(16)
    scheduler = BatchScheduler(StepLimits(16, 4), pool)
    core = EngineCore(Script(lines), scheduler)  # type: ignore[arg-type]
    core.kv_transfers.use_device(Memory(16))
    return core


def test_what_is_being_sent_of_a_prompt_with_nan_is_cleared_and_not_found() -> None:
    """The transfer kept its blocks in the cache, and they spread to whoever got them next."""
    engine = engine_with_transfers({1: [NAN]})
    first = generation(1)
    first.outgoing = OutgoingBlocks(0, 1, lambda computed, began_s: None)
    engine.submit(first)
    assert run(engine)[1][-1].finish is FinishReason.ERROR
    assert first.outgoing.blocks
    assert first.outgoing.is_closed
    assert len(engine._executor.cleared) == 2  # type: ignore[attr-defined]
    assert not engine.scheduler.pool.cached_blocks()


def test_blocks_with_nan_that_arrived_are_cleared_and_not_found() -> None:
    engine = engine_with_transfers({1: [NAN]})
    first, transfers = generation(1), engine.kv_transfers
    assert transfers is not None
    digests = first.sequence.block_digests(1)
    transfers.open_incoming("t", digests)
    assert transfers.store_incoming("t", digests, torch.full((1, 1), torch.nan))
    engine.submit(first)
    assert run(engine)[1][-1].finish is FinishReason.ERROR
    assert first.sequence.cached_tokens == 16
    assert len(engine._executor.cleared) == 2  # type: ignore[attr-defined]
    assert not engine.scheduler.pool.cached_blocks()
    transfers.close_incoming("t")


def test_cancelling_a_generation_before_its_prompt_cancels_its_forks() -> None:
    engine = engine_of({1: []})
    first = generation(1)
    first.forks = (generation(2),)
    engine.submit(first)
    engine.cancel(1)
    engine.cancel(2)
    assert not engine.has_work
    assert not engine._generations


def test_text_held_back_for_a_stop_string_is_emitted_at_the_end() -> None:
    engine = engine_of({1: [*b"ab", END]})
    engine.submit(generation(1, stops=("abc",)))
    deltas = run(engine)[1]
    assert [delta.text for delta in deltas] == ["", "", "ab"]


def test_a_cancelled_generation_frees_its_blocks_before_the_next_step() -> None:
    engine = engine_of({1: [*b"x" * 50], 2: [*b"yz", END]})
    engine.submit(generation(1))
    engine.submit(generation(2))
    engine.step()
    engine.step()
    engine.cancel(1)
    engine.cancel(1)
    deltas_of = run(engine)
    assert set(deltas_of) == {2}
