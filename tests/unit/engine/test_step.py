"""The corridor with a scripted model: what ends a generation, and that its blocks come back."""

from collections.abc import Callable

import torch
from torch import Tensor

from nodeagent.engine.core.step import Delta, Engine, Generation
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batching import Batch, Batching, Limits
from nodeagent.engine.scheduler.sequence import Ending, Finish, Sequence
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from tests.unit.engine.test_text import VOCABULARY

END = 256
UNSOUND = -1


class Script:
    """Says each sequence's bytes in turn, by number."""

    def __init__(self, lines: dict[int, list[int]]) -> None:
        self.lines = lines
        self.cleared: list[int] = []
        self.copied: list[tuple[int, int]] = []

    def clear(self, blocks: list[int]) -> None:
        self.cleared += blocks

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.copied += pairs

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        rows = []
        for chunk in batch.chunks:
            if chunk.samples:
                token = self.lines[chunk.sequence.number][chunk.sequence.output_tokens]
                row = torch.zeros(257)
                row[token] = torch.nan if token == UNSOUND else 1.0
                rows.append(row)
        logits = torch.stack(rows) if rows else torch.zeros(0, 257)
        return lambda: logits


def engine_saying(lines: dict[int, list[int]]) -> Engine:
    return Engine(Script(lines), Batching(Limits(16, 4), Blocks(16)))  # type: ignore[arg-type]


def generation(number: int, tokens_max: int = 50, stops: tuple[str, ...] = ()) -> Generation:
    return Generation(
        Sequence(number, [65] * 20, Ending(tokens_max, frozenset({END}))),
        Sampler(SamplingParams(temperature=0), []),
        TokenText(VOCABULARY),
        StopStrings(stops),
    )


def run(engine: Engine) -> dict[int, list[Delta]]:
    told: dict[int, list[Delta]] = {}
    while engine.busy:
        for delta in engine.step().deltas:
            told.setdefault(delta.number, []).append(delta)
    assert engine.batching.blocks.held == 0
    return told


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_each_ends_for_its_own_reason_and_harms_no_other() -> None:
    engine = engine_saying(
        {
            1: [*b"hello", END],
            2: [*"h\u00e9llo".encode()],
            3: [*b"a stop b"],
            4: [*b"ok", UNSOUND],
        }
    )
    for one in (generation(1), generation(2, 4), generation(3, stops=("sto",)), generation(4)):
        engine.submit(one)
    told = run(engine)
    assert [told[n][-1].finish for n in (1, 2, 3, 4)] == [
        Finish.STOP,
        Finish.LENGTH,
        Finish.STOP,
        Finish.ERROR,
    ]
    assert [text(told[n]) for n in (1, 2, 3, 4)] == ["hello", "h\u00e9l", "a ", "ok"]
    assert told[1][-1].output_tokens == 5
    assert told[4][-1].error.startswith("cannot sample")
    assert all(delta.finish is None for deltas in told.values() for delta in deltas[:-1])
    assert engine.output_tokens_total == 5 + 4 + 5 + 2
    # What is no number must not spread to who gets the blocks next.
    assert engine._runner.cleared  # type: ignore[attr-defined]


def test_several_answers_draw_from_the_prompts_last_row_and_end_each_for_itself() -> None:
    engine = engine_saying({1: [*b"ab", END], 2: [*b"aXY", END], 3: [*b"aZ"]})
    first = generation(1)
    first.followers = (generation(2), generation(3, 2))
    engine.submit(first)
    told = run(engine)
    assert [text(told[number]) for number in (1, 2, 3)] == ["ab", "aXY", "aZ"]
    assert [told[n][-1].finish for n in (1, 2, 3)] == [Finish.STOP, Finish.STOP, Finish.LENGTH]
    assert engine.prompt_tokens_total == 20
    assert engine.output_tokens_total == 2 + 3 + 2


def test_answers_to_an_unsound_prompt_all_end_and_their_blocks_are_cleared() -> None:
    engine = engine_saying({1: [UNSOUND], 2: []})
    first = generation(1)
    first.followers = (generation(2),)
    engine.submit(first)
    told = run(engine)
    assert [told[number][-1].finish for number in (1, 2)] == [Finish.ERROR, Finish.ERROR]
    assert len(engine._runner.cleared) == 2  # type: ignore[attr-defined]
    assert not engine.batching.blocks.remembered()


def test_who_is_cancelled_before_its_prompt_takes_its_followers_along() -> None:
    engine = engine_saying({1: []})
    first = generation(1)
    first.followers = (generation(2),)
    engine.submit(first)
    engine.cancel(1)
    engine.cancel(2)
    assert not engine.busy
    assert not engine._generations


def test_text_held_back_is_told_at_the_end() -> None:
    engine = engine_saying({1: [*b"ab", END]})
    engine.submit(generation(1, stops=("abc",)))
    deltas = run(engine)[1]
    assert [delta.text for delta in deltas] == ["", "", "ab"]


def test_a_cancelled_generation_frees_its_blocks_before_the_next_step() -> None:
    engine = engine_saying({1: [*b"x" * 50], 2: [*b"yz", END]})
    engine.submit(generation(1))
    engine.submit(generation(2))
    engine.step()
    engine.step()
    engine.cancel(1)
    engine.cancel(1)
    told = run(engine)
    assert set(told) == {2}
