"""What bad files and bad numbers may do: be refused in words, or end the one sequence they spoil.

The files in `hostile/` were found by ops/fuzz/checkpoints.py; each once ended in something else.
"""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.generation import Generation, GenerationDelta
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.loading import load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from ops.fuzz import checkpoints
from ops.golden import tiny

CASES = sorted((Path(__file__).parent / "hostile").iterdir())
FUZZED_PER_FILE = 25
SPOILT = 13


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_what_was_found_stays_refused(tmp_path: Path, case: Path) -> None:
    family, _, name = case.name.partition(".")[2].partition(".")
    checkpoints.write_model(tmp_path, family, name)
    (tmp_path / name).unlink()
    shutil.copy(case, tmp_path / name)
    assert checkpoints.run(tmp_path, name) in ("refused", "loaded", "generated")


@pytest.mark.parametrize("name", checkpoints.FILES)
def test_changed_files_load_or_are_refused_in_words(tmp_path: Path, name: str) -> None:
    checkpoints.write_model(tmp_path, "qwen2", name)
    assert checkpoints.run(tmp_path, name) == "generated"
    chance = random.Random(20)
    whole = (tmp_path / name).read_bytes()
    for _ in range(FUZZED_PER_FILE):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(checkpoints.mutate(chance, name, whole))
        checkpoints.run(tmp_path, name)


def generate(
    engine: EngineCore, vocabulary: Vocabulary, prompts: dict[int, list[int]]
) -> dict[int, GenerationDelta]:
    """Run `prompts` together; return each one's last delta."""
    sequences = {
        n: Sequence(n, list(p), StopConditions(8, frozenset())) for n, p in prompts.items()
    }
    for sequence in sequences.values():
        engine.submit(
            Generation(
                sequence,
                Sampler(SamplingParams(temperature=0), []),
                StreamDetokenizer(vocabulary),
                StopStrings(()),
            )
        )
    last: dict[int, GenerationDelta] = {}
    while engine.has_work:
        last |= {delta.number: delta for delta in engine.step().deltas}
    assert engine.scheduler.pool.used_blocks == 0
    for number, sequence in sequences.items():
        prompts[number].extend(sequence.tokens[sequence.prompt_tokens :])
    return last


def test_numbers_that_are_none_end_their_sequence_and_no_neighbour(tmp_path: Path) -> None:
    for name in ("sound", "spoilt"):
        (tmp_path / name).mkdir()
        tiny.write_folder(tmp_path / name, "llama")
        tiny.write_tokenizer(tmp_path / name)
        if name == "spoilt":
            weights = tiny.weights_of("llama")
            weights["model.embed_tokens.weight"][SPOILT] = torch.nan
            # A head of its own, or the logit of the spoilt token were no number for anyone.
            config = tmp_path / name / "config.json"
            config.write_text(config.read_text().replace('embeddings": true', 'embeddings": false'))
            weights["lm_head.weight"] = tiny.weights_of("llama")["model.embed_tokens.weight"]
            save_file(weights, tmp_path / name / "model.safetensors")
    sound, spoilt = (
        load_engine(
            EngineConfig(
                model_path=str(tmp_path / name),
                served_name="x",
                socket="unused",
                batch_tokens_max=40,
                threads=1,
            )
        )
        for name in ("sound", "spoilt")
    )
    good = {2: [1, 2, 3], 3: list(range(20, 50)), 4: [5] * 17}
    alone = {n: list(p) for n, p in good.items()}
    generate(sound.engine, sound.vocabulary, alone)
    # The spoilt one is first, so that its blocks are the first: padding once pointed there.
    for prompts in ({1: [7, SPOILT, 9], **good}, {1: [SPOILT], **good}, good):
        ours = {n: list(p) for n, p in prompts.items()}
        last = generate(spoilt.engine, spoilt.vocabulary, ours)
        if 1 in last:
            assert last[1].finish is FinishReason.ERROR
            assert "no finite logits" in last[1].error
        assert {n: ours[n] for n in good} == alone
        assert all(last[n].finish is FinishReason.LENGTH for n in good)


def test_a_template_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, "llama")
    tiny.write_tokenizer(tmp_path)
    deep = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    (tmp_path / "chat_template.jinja").write_text(deep)
    with pytest.raises(CheckpointError, match="cannot compile the chat template"):
        load_engine(EngineConfig(model_path=str(tmp_path), served_name="x", socket="unused"))
