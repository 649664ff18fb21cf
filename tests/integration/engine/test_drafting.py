"""Draft models loaded from files: matching ones are used, others are refused with a message."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from ops.golden.tiny import write_tokenizer
from tests.integration.engine.test_llama_folder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MLP,
    VOCABULARY,
    write_folder,
)


def config_of(model: Path, draft: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(model),
        served_name="tiny",
        socket="unused",
        draft_path=str(draft),
        quantisation="none",
        kv_memory_bytes=1 << 20,
    )


def folder(path: Path) -> Path:
    path.mkdir()
    write_folder(path, tied=False, scaled=False, sharded=False)
    write_tokenizer(path)
    return path


def write_head(path: Path, vocabulary: int = VOCABULARY) -> Path:
    """An EAGLE-3 head of random weights for the tiny model."""
    path.mkdir()
    generator = torch.Generator().manual_seed(4)
    columns = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (MLP, HIDDEN),
        "midlayer.mlp.up_proj": (MLP, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, MLP),
    }
    for name, rows in {**columns, "v_proj": columns["k_proj"]}.items():
        shapes[f"midlayer.self_attn.{name}"] = (rows, 2 * HIDDEN)
    weights = {
        f"{name}.weight": 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    weights["norm.weight"] = torch.ones(HIDDEN)
    save_file(weights, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def answer(loaded: LoadedEngine, *, drafts: bool, answers: int = 2) -> list[int]:
    engine = loaded.engine
    speculation = engine.speculation
    assert speculation is not None
    assert speculation.model is not None
    # Drafting is assumed to cost nothing, so that the model always drafts.
    speculation.model.cost_share, speculation.model.clock = 0.01, lambda: 0.0
    # All answer one prompt, which ends inside a block that they share.
    first, *others = (
        Generation(
            Sequence(number, list(range(1, 30)), StopConditions(40, frozenset())),
            Sampler(SamplingParams(temperature=0), []),
            StreamDetokenizer(loaded.vocabulary),
            StopStrings(()),
            speculation.drafter() if drafts else None,
        )
        for number in range(1, answers + 1)
    )
    first.forks = tuple(others)
    engine.submit(first)
    while engine.has_work:
        engine.record_timing(engine.step(), 1.0)
    assert engine.scheduler.pool.used_blocks == 0
    assert all(other.sequence.tokens == first.sequence.tokens for other in others)
    return first.sequence.tokens


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_matching_draft_model_drafts(tmp_path: Path, kind: str) -> None:
    served = folder(tmp_path / "served")
    draft = served if kind == "model" else write_head(tmp_path / "head")
    loaded = load_engine(config_of(served, draft))
    bare = load_engine(EngineConfig(model_path=str(served), served_name="t", socket="unused"))
    assert loaded.weights_bytes > bare.weights_bytes
    assert answer(loaded, drafts=True) == answer(loaded, drafts=False)
    assert loaded.engine.speculation is not None
    counts = loaded.engine.speculation.counts()
    assert counts[f"drafted_by_{kind}_tokens_total"] > 0
    if kind == "model":
        assert counts["accepted_by_model_tokens_total"] > 20


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    served, other = folder(tmp_path / "served"), folder(tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"'<more>' is token 64 of 65 there, None of 64"):
        load_engine(config_of(served, other))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_engine(config_of(served, tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="a head for tokens of 99"):
        load_engine(config_of(served, write_head(tmp_path / "head", vocabulary=99)))
