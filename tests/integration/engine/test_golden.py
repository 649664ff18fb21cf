"""Greedy output equals that of transformers on the same weights, alone and batched.

The golden ids and how they came about: ops/golden/make_golden.py. Its file also tells each case's
least margin between the two best logits: all are far above fp32 noise, so order of summation
excuses nothing here.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.step import Generation
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NUMBERS = itertools.count(1)
_PART_TOKENS = 32


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> Loaded:
    # Few blocks and a small budget, so that chunks, and waiting, are part of what is held.
    return load(
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
    loaded: Loaded, cases: list[dict[str, Any]], *, drafts: bool = False
) -> list[tuple[list[int], str]]:
    texts: dict[int, str] = {}
    speculation = loaded.engine.speculation
    sequences: list[Sequence] = []
    for case in cases:
        tokens_max = _PART_TOKENS if drafts else GOLDEN["tokens"]
        ending = Ending(tokens_max, loaded.vocabulary.stop_ids)
        sequence = Sequence(next(NUMBERS), list(case["prompt_ids"]), ending)
        sequences.append(sequence)
        texts[sequence.number] = ""
        sampler = Sampler(SamplingParams(temperature=0), [])
        loaded.engine.submit(
            Generation(
                sequence,
                sampler,
                TokenText(loaded.vocabulary),
                StopStrings(()),
                speculation.drafter() if drafts and speculation else None,
            )
        )
    while loaded.engine.busy:
        for delta in loaded.engine.step().deltas:
            texts[delta.number] += delta.text
    assert loaded.engine.batching.blocks.held == 0
    return [(s.tokens[s.prompt_tokens :], texts[s.number]) for s in sequences]


def expect(loaded: Loaded, case: dict[str, Any], output: list[int], text: str) -> None:
    wanted = [token for token in case["output_ids"] if token not in loaded.vocabulary.stop_ids]
    assert output == wanted, case["text"]
    # A character still incomplete at the end is not emitted; elsewhere texts are equal.
    assert text == loaded.vocabulary.tokenizer.decode(wanted).rstrip("\ufffd")


def test_prompts_are_tokenised_as_by_transformers(loaded: Loaded) -> None:
    for case in CASES:
        assert loaded.vocabulary.encode(case["text"], special=False) == case["prompt_ids"]
        plain = loaded.vocabulary.tokenizer.decode(case["prompt_ids"], skip_special_tokens=False)
        assert plain == case["text"]


def test_the_chat_template_is_rendered_as_by_transformers(loaded: Loaded) -> None:
    assert loaded.template is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert loaded.template.render(question) == CASES[0]["text"]


def test_greedy_output_is_equal_in_a_batch(loaded: Loaded) -> None:
    outputs = generate(loaded, CASES)
    for case, (output, text) in zip(CASES, outputs, strict=True):
        expect(loaded, case, output, text)


def test_greedy_output_is_equal_alone(loaded: Loaded) -> None:
    for case in CASES:
        ((output, text),) = generate(loaded, [case])
        expect(loaded, case, output, text)


def test_greedy_output_is_equal_with_drafts(loaded: Loaded) -> None:
    speculation = loaded.engine.speculation
    assert speculation is not None
    # Alone, where drafts are long, and in company; a part of each output tells.
    for cases in ([CASES[0]], [CASES[7]], CASES[2:6]):
        for case, (output, _) in zip(cases, generate(loaded, cases, drafts=True), strict=True):
            wanted = [one for one in case["output_ids"] if one not in loaded.vocabulary.stop_ids]
            assert output == wanted[:_PART_TOKENS], case["text"]
    assert speculation.drafted_tokens_total > 0
