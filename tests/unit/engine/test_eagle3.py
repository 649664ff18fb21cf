"""EAGLE-3 heads: logits equal a plain reference, answers are what they would have been."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.distributed.collectives import SINGLE_RANK
from nodeagent.engine.draft_loading import Eagle3HeadFiles, TargetCheckpoint, open_draft
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.batch import Batch, BatchChunk, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.speculative.draft_model import DraftTarget
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.weights.eagle3_folder import EagleFolder, is_eagle_head
from tests.unit.engine.byte_vocabulary import VOCABULARY as TEXT
from tests.unit.engine.test_draft_model import GREEDY, generated, prompts, run, submit
from tests.unit.engine.tiny import SHAPE, VOCABULARY, llama

HIDDEN, CHOICES = SHAPE.hidden, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": CHOICES,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def head_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    at = "midlayer."
    targets = torch.randperm(VOCABULARY, generator=generator)[:CHOICES].sort().values
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[targets] = True
    return {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        f"{at}hidden_norm.weight": 1 + weight(HIDDEN),
        f"{at}input_layernorm.weight": 1 + weight(HIDDEN),
        f"{at}post_attention_layernorm.weight": 1 + weight(HIDDEN),
        f"{at}self_attn.q_proj.weight": weight(16, 2 * HIDDEN),
        f"{at}self_attn.k_proj.weight": weight(8, 2 * HIDDEN),
        f"{at}self_attn.v_proj.weight": weight(8, 2 * HIDDEN),
        f"{at}self_attn.o_proj.weight": weight(HIDDEN, 16),
        f"{at}mlp.gate_proj.weight": weight(24, HIDDEN),
        f"{at}mlp.up_proj.weight": weight(24, HIDDEN),
        f"{at}mlp.down_proj.weight": weight(HIDDEN, 24),
        "norm.weight": 1 + weight(HIDDEN),
        "lm_head.weight": weight(CHOICES, HIDDEN),
        "d2t": targets - torch.arange(CHOICES),
        "t2d": known,
    }


def write_head(folder: Path, weights: dict[str, Tensor], **changed: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    save_file(weights, folder / "model.safetensors")
    return folder


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(model_path="m", served_name="m", socket="s", draft_path=str(path))


def opened(path: Path, blocks: int = 64) -> tuple[ModelRunner, Llama, Eagle3HeadFiles]:
    head = open_draft(config_of(path), SHAPE, TEXT)
    assert isinstance(head, Eagle3HeadFiles)
    model = llama(1)
    return ModelRunner(model, blocks, "cpu", torch.float32), model, head


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotate [tokens, heads, 4] to positions 0, 1, ..."""
    angles = torch.arange(len(x))[:, None] / 10_000 ** (torch.arange(2) / 2)
    cos, sin = (f(torch.cat((angles, angles), -1))[:, None] for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def layer(w: dict[str, Tensor], embeds: Tensor, hidden: Tensor) -> Tensor:
    """The head's layer over a whole sequence, from the definition."""
    at = "midlayer."
    read = torch.cat(
        (
            normed(embeds, w[f"{at}input_layernorm.weight"]),
            normed(hidden, w[f"{at}hidden_norm.weight"]),
        ),
        -1,
    )
    query, key, value = (
        (read @ w[f"{at}self_attn.{n}_proj.weight"].T).view(len(read), -1, 4) for n in "qkv"
    )
    query, key = turned(query), turned(key)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / 2
    seen = torch.ones(len(read), len(read), dtype=torch.bool).tril()
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    answer = torch.einsum("hqk,khd->qhd", shares, value).reshape(len(read), -1)
    x = hidden + answer @ w[f"{at}self_attn.o_proj.weight"].T
    inner = normed(x, w[f"{at}post_attention_layernorm.weight"])
    gate, up = (inner @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T


def chain_of(w: dict[str, Tensor], states: Tensor, embeds: Tensor, table: Tensor) -> list[int]:
    """Draft four tokens by the definition: the whole sequence anew for each of them."""
    drafts: list[int] = []
    hidden = states @ w["fc.weight"].T
    for _ in range(4):
        out = layer(w, embeds, hidden)
        choice = int((normed(out[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        drafts.append(choice + int(w["d2t"][choice]))
        # It goes on from its own hidden state, before the norm.
        hidden = torch.cat((hidden, out[-1:]))
        embeds = torch.cat((embeds, table[drafts[-1]][None]))
    return drafts


@pytest.mark.parametrize("tokens", [4, 16, 37])
def test_drafts_are_those_of_a_plain_reference(tmp_path: Path, tokens: int) -> None:
    weights = head_weights()
    runner, model, head = opened(write_head(tmp_path, weights))
    ahead = head.load(
        config_of(tmp_path), runner, model, TargetCheckpoint(head.source, model.shape, SINGLE_RANK)
    )
    heard: dict[int, Tensor] = {}
    keep = model.record_states
    assert keep is not None

    def hear(number: int, x: Tensor) -> None:
        heard[number] = x.clone()
        keep(number, x)

    model.record_states = hear
    ids = prompts(1, tokens)[0][:tokens]
    sequence = Sequence(1, [*ids, 7], StopConditions(9, frozenset()))
    sequence.blocks = list(range(5, 5 + -(-(tokens + 6) // BLOCK_TOKENS)))
    runner.run(Batch((), (BatchChunk(sequence, 0, tokens),)))
    sequence.computed_tokens = tokens
    (drafts,) = ahead.draft([DraftTarget(sequence, ahead.draft_sequence(sequence))], 4, 64)
    table = model.embed(torch.arange(VOCABULARY))
    states = torch.cat([heard[number] for number in (2, 2, 1)], -1)
    assert list(drafts) == chain_of(weights, states, table[[*ids[1:], 7]], table)


@pytest.mark.parametrize("blocks", [64, 9])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=3)])
def test_the_output_is_the_same_with_a_head_and_without(
    tmp_path: Path, params: SamplingParams, blocks: int
) -> None:
    runner, model, head = opened(write_head(tmp_path, head_weights()), blocks)
    ahead = head.load(
        config_of(tmp_path), runner, model, TargetCheckpoint(head.source, model.shape, SINGLE_RANK)
    )
    ahead.clock = lambda: 0.0
    speculation = Speculation(4, rows_max=200, model=ahead)
    engine = EngineCore(
        runner, BatchScheduler(StepLimits(64, 4), BlockPool(blocks)), speculation=speculation
    )
    found = [submit(engine, n, p, params) for n, p in enumerate(prompts(3))]
    run(engine)
    plain, _, _ = generated(None, params, blocks)
    assert [sequence.tokens for sequence in found] == plain
    assert speculation.counts_by_kind["head"].drafted > 0


@pytest.mark.parametrize(
    ("changed", "dropped", "says"),
    [
        ({"num_hidden_layers": 2}, "", "2 layers, one is supported"),
        ({"vocab_size": 300}, "", "a head for tokens of 300"),
        ({"target_hidden_size": 8}, "", "a head for hidden states of 8"),
        ({"draft_vocab_size": 41}, "", "is"),
        ({"draft_vocab_size": 2**64}, "", "18446744073709551616 tokens of 257"),
        ({"draft_vocab_size": -1}, "", "-1 tokens of 257"),
        ({}, "fc.weight", "lacks fc.weight"),
        ({}, "d2t", "lacks d2t"),
        ({}, "midlayer.self_attn.k_proj.weight", "lacks midlayer.self_attn.k_proj.weight"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}},
            "",
            "three within it are needed",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, changed: dict[str, Any], dropped: str, says: str
) -> None:
    weights = head_weights()
    weights.pop(dropped, None)
    write_head(tmp_path, weights, **changed)
    with pytest.raises(CheckpointError, match=says):
        open_draft(config_of(tmp_path), SHAPE, TEXT)


def test_a_speculators_head_drafts_as_its_authors_own(tmp_path: Path) -> None:
    """As vLLM's users publish them: the layer's numbers apart, layers by what goes into them."""
    weights = head_weights()
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in weights.items()}
    own = {name: CONFIG[name] for name in ("architectures", "draft_vocab_size")}
    said = {
        **own,
        "architectures": ["Eagle3Speculator"],
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [2, 2, 1],
        "transformer_layer_config": {k: v for k, v in CONFIG.items() if k not in own},
    }
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert is_eagle_head(tmp_path)
    head = open_draft(config_of(tmp_path), SHAPE, TEXT)
    assert isinstance(head, Eagle3HeadFiles)
    assert head.layers == (2, 2, 1)
    assert (head.source.shape.hidden, head.source.choices) == (HIDDEN, CHOICES)
    head.close()
    for odd, says in (
        ({"transformer_layer_config": 7}, "cannot read"),
        ({"transformer_layer_config": {}}, "missing required field"),
        ({"norm_before_fc": True}, "more than one norm"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(said | odd))
        with pytest.raises(CheckpointError, match=says):
            EagleFolder(tmp_path)


def test_a_head_may_name_its_layers_and_lead_nowhere(tmp_path: Path) -> None:
    weights = head_weights()
    weights["d2t"][3] = VOCABULARY
    said = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    folder = EagleFolder(write_head(tmp_path, weights, **said))
    assert folder.layers_heard(4) == (1, 2, 3)
    with pytest.raises(CheckpointError, match="d2t gives tokens outside"):
        folder.targets()
    folder.close()
    assert is_eagle_head(tmp_path)
    assert not is_eagle_head(tmp_path / "nothing")
