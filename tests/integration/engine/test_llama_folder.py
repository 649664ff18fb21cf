"""A Hugging Face folder of random weights: logits equal a plain reference within 1e-4.

The reference is written here a second time, from the definition: no cache, no batch, no fusing.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.loading import load_engine
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.weights.safetensors_folder import SafetensorsFolder
from ops.golden.tiny import write_tokenizer

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 48, 2, 4, 2, 8, 64
THETA, EPSILON = 10_000.0, 1e-5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def random_weights(tied: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": 1 + weight(HIDDEN),
    }
    if not tied:
        weights["lm_head.weight"] = weight(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights[f"{at}input_layernorm.weight"] = 1 + weight(HIDDEN)
        weights[f"{at}post_attention_layernorm.weight"] = 1 + weight(HIDDEN)
        weights[f"{at}self_attn.q_proj.weight"] = weight(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.k_proj.weight"] = weight(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.v_proj.weight"] = weight(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{at}mlp.gate_proj.weight"] = weight(MLP, HIDDEN)
        weights[f"{at}mlp.up_proj.weight"] = weight(MLP, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = weight(HIDDEN, MLP)
    return weights


def write_folder(folder: Path, tied: bool, scaled: bool, sharded: bool) -> dict[str, Tensor]:
    weights = random_weights(tied)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "rope_scaling": LLAMA3 if scaled else None,
        "tie_word_embeddings": tied,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    shards = [names[::2], names[1::2]] if sharded else [names]
    files: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors" if sharded else "model.safetensors"
        save_file({key: weights[key] for key in shard}, folder / name)
        files |= dict.fromkeys(shard, name)
    if sharded:
        index = {"weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def frequency(pair: int, scaled: bool) -> float:
    angle: float = THETA ** (-2 * pair / HEAD_DIM)
    if not scaled:
        return angle
    wavelength = 2 * math.pi / angle
    if wavelength < 16 / 4.0:
        return angle
    if wavelength > 16 / 1.0:
        return angle / 8.0
    share = (16 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - share) * angle / 8.0 + share * angle


def turn(vector: Tensor, position: int, scaled: bool) -> Tensor:
    half = HEAD_DIM // 2
    turned = vector.clone()
    for pair in range(half):
        angle = position * frequency(pair, scaled)
        a, b = vector[pair], vector[pair + half]
        turned[pair] = a * math.cos(angle) - b * math.sin(angle)
        turned[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + EPSILON).sqrt() * weight


def reference(weights: dict[str, Tensor], tokens: list[int], scaled: bool) -> Tensor:
    """Return the logits after every token, from the definition."""
    rows = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        after = []
        for position, row in enumerate(rows):
            x = normed(row, weights[f"{at}input_layernorm.weight"])
            q, k, v = (weights[f"{at}self_attn.{n}_proj.weight"] @ x for n in "qkv")
            keys.append([turn(h, position, scaled) for h in k.view(KV_HEADS, HEAD_DIM)])
            values.append(list(v.view(KV_HEADS, HEAD_DIM)))
            answers = []
            for head, query in enumerate(q.view(HEADS, HEAD_DIM)):
                shared = head // (HEADS // KV_HEADS)
                turned = turn(query, position, scaled)
                scores = torch.stack([turned @ heads[shared] for heads in keys])
                mix = (scores / math.sqrt(HEAD_DIM)).softmax(0)
                answers.append(mix @ torch.stack([heads[shared] for heads in values]))
            row = row + weights[f"{at}self_attn.o_proj.weight"] @ torch.cat(answers)
            x = normed(row, weights[f"{at}post_attention_layernorm.weight"])
            gate = weights[f"{at}mlp.gate_proj.weight"] @ x
            up = weights[f"{at}mlp.up_proj.weight"] @ x
            gated = gate * gate.sigmoid() * up
            after.append(row + weights[f"{at}mlp.down_proj.weight"] @ gated)
        rows = after
    out = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([out @ normed(row, weights["model.norm.weight"]) for row in rows])


@pytest.mark.parametrize(("tied", "scaled", "sharded"), [(True, False, False), (False, True, True)])
def test_logits_equal_the_definition(
    tmp_path: Path, tied: bool, scaled: bool, sharded: bool
) -> None:
    weights = write_folder(tmp_path, tied, scaled, sharded)
    source = SafetensorsFolder(tmp_path)
    model = Llama(source.shape, source, "cpu", torch.float32, 128)
    source.close()
    runner = ModelRunner(model, 16, "cpu", torch.float32)
    # Budget 9: prompts come in chunks, mixed with the decodes of those that came before.
    batching = BatchScheduler(StepLimits(9, 4), BlockPool(16))
    generator = torch.Generator().manual_seed(2)
    sequences = []
    for number, length in enumerate((5, 37, 21)):
        tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        sequences.append(Sequence(number, tokens, StopConditions(8, frozenset())))
        batching.submit(sequences[-1])
    wanted: dict[tuple[int, int], Tensor] = {}
    while batching.has_work:
        batch = batching.next_batch()
        logits = runner.run(batch)
        for chunk in batch.chunks:
            batching.mark_computed(chunk)
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        for sequence, row in zip(sampling, logits, strict=True):
            wanted[sequence.number, len(sequence.tokens)] = row.clone()
            if sequence.append(int(row.argmax())):
                batching.remove(sequence)
    assert len(wanted) == 3 * 8
    for sequence in sequences:
        plain = reference(weights, sequence.tokens, scaled)
        for length in range(sequence.prompt_tokens, len(sequence.tokens)):
            row = wanted[sequence.number, length]
            assert torch.allclose(row, plain[length - 1], atol=1e-4, rtol=0)


def test_a_folder_is_loaded_whole(tmp_path: Path) -> None:
    write_folder(tmp_path, tied=True, scaled=False, sharded=True)
    write_tokenizer(tmp_path)
    # Ends that no token is: some files say so of tokens that they took out.
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [5, -1, {2**70}]}}')
    loaded = load_engine(
        EngineConfig(model_path=str(tmp_path), served_name="tiny", socket="unused")
    )
    assert loaded.vocabulary.stop_ids == {0, 5, VOCABULARY - 1}
    assert loaded.template is not None
    assert loaded.template.render([{"role": "user", "content": "hi"}]) == "hi"
    assert loaded.context_tokens == 128


def test_a_config_that_lies_about_shapes_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tied=True, scaled=False, sharded=False)
    write_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"hidden_size": {HIDDEN}', '"hidden_size": 64'))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \(64, 32\)"):
        load_engine(EngineConfig(model_path=str(tmp_path), served_name="tiny", socket="unused"))


@pytest.mark.parametrize("kv_memory_bytes", [1, 2**60])
def test_a_kv_size_that_cannot_be_is_refused_before_loading(
    tmp_path: Path, kv_memory_bytes: int
) -> None:
    write_folder(tmp_path, tied=True, scaled=False, sharded=False)
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=str(kv_memory_bytes)):
        load_engine(
            EngineConfig(
                model_path=str(tmp_path),
                served_name="tiny",
                socket="unused",
                kv_memory_bytes=kv_memory_bytes,
            )
        )
