"""Greedy output equals that of transformers on the same weights, alone and batched.

ops/golden/make_golden.py made the golden ids. Its file also has the smallest margin between the two
best logits of each case: all are far above fp32 noise, so that the order of summation cannot change
the output.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NUMBERS = itertools.count(1)
_PART_TOKENS = 32


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedEngine:
    # Few blocks and a small budget, so that prompts are computed in chunks and sequences wait.
    return load_engine(
        EngineConfig(
            model_path=str(model_path),
            served_name="smollm2",
            socket="unused",
            sequences_max=16,
            batch_tokens_max=80,
            kv_memory_bytes=96 * 1024 * 1024,
            threads=2,
        )
    )


def generate(
    loaded: LoadedEngine, cases: list[dict[str, Any]], *, drafts: bool = False
) -> list[tuple[list[int], str]]:
    texts: dict[int, str] = {}
    speculation = loaded.engine.speculation
    sequences: list[Sequence] = []
    for case in cases:
        tokens_max = _PART_TOKENS if drafts else GOLDEN["tokens"]
        stop_conditions = StopConditions(tokens_max, loaded.vocabulary.stop_ids)
        sequence = Sequence(next(NUMBERS), list(case["prompt_ids"]), stop_conditions)
        sequences.append(sequence)
        texts[sequence.number] = ""
        sampler = Sampler(SamplingParams(temperature=0), [])
        loaded.engine.submit(
            Generation(
                sequence,
                sampler,
                StreamDetokenizer(loaded.vocabulary),
                StopStrings(()),
                speculation.drafter() if drafts and speculation else None,
            )
        )
    while loaded.engine.has_work:
        for delta in loaded.engine.step().deltas:
            texts[delta.number] += delta.text
    assert loaded.engine.scheduler.pool.used_blocks == 0
    return [(s.tokens[s.prompt_tokens :], texts[s.number]) for s in sequences]


def check_output(loaded: LoadedEngine, case: dict[str, Any], output: list[int], text: str) -> None:
    expected = [token for token in case["output_ids"] if token not in loaded.vocabulary.stop_ids]
    assert output == expected, case["text"]
    # A character still incomplete at the end is not emitted; elsewhere texts are equal.
    assert text == loaded.vocabulary.tokenizer.decode(expected).rstrip("\ufffd")


def test_prompts_are_tokenised_as_by_transformers(loaded: LoadedEngine) -> None:
    for case in CASES:
        assert loaded.vocabulary.encode(case["text"], special=False) == case["prompt_ids"]
        plain = loaded.vocabulary.tokenizer.decode(case["prompt_ids"], skip_special_tokens=False)
        assert plain == case["text"]


def test_the_chat_template_is_rendered_as_by_transformers(loaded: LoadedEngine) -> None:
    assert loaded.template is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert loaded.template.render(question) == CASES[0]["text"]


def test_greedy_output_is_equal_in_a_batch(loaded: LoadedEngine) -> None:
    outputs = generate(loaded, CASES)
    for case, (output, text) in zip(CASES, outputs, strict=True):
        check_output(loaded, case, output, text)


def test_greedy_output_is_equal_alone(loaded: LoadedEngine) -> None:
    for case in CASES:
        ((output, text),) = generate(loaded, [case])
        check_output(loaded, case, output, text)


def test_greedy_output_is_equal_with_drafts(loaded: LoadedEngine) -> None:
    speculation = loaded.engine.speculation
    assert speculation is not None
    # Alone, with long drafts, and in a batch. The first tokens of each output are compared.
    for cases in ([CASES[0]], [CASES[7]], CASES[2:6]):
        for case, (output, _) in zip(cases, generate(loaded, cases, drafts=True), strict=True):
            stop_ids = loaded.vocabulary.stop_ids
            expected = [token for token in case["output_ids"] if token not in stop_ids]
            assert output == expected[:_PART_TOKENS], case["text"]
    assert speculation.drafted_tokens_total > 0
