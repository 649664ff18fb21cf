"""Each family of decoders computes what transformers computes, from either kind of file.

The golden logits and how they came about: ops/golden/make_families.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.model.families import check_weights
from nodeagent.engine.weights.checkpoint import open_checkpoint
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.safetensors_folder import SafetensorsFolder
from nodeagent.engine.weights.weight_source import WeightSource
from ops.golden import tiny
from ops.golden.tiny_gguf import write_gguf
from tests.integration.engine.forced import logits_of

GOLDEN = json.loads((Path(__file__).parent / "golden_families.json").read_text())


def expect(family: str, shape: DecoderShape, source: WeightSource) -> None:
    prompts = tiny.prompts()
    alone = [logits_of(shape, source, [prompt], 100)[0] for prompt in prompts]
    # Budget 9: prompts come in chunks, mixed with the decodes of those that came before.
    together = logits_of(shape, source, prompts, 9)
    for number, golden in enumerate(GOLDEN[family]):
        wanted = torch.tensor(golden)
        assert torch.allclose(torch.stack(alone[number]), wanted, atol=1e-4, rtol=0)
        assert torch.allclose(torch.stack(together[number]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", list(tiny.CONFIGS))
def test_a_folder_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    tiny.write_folder(tmp_path, family)
    source = SafetensorsFolder(tmp_path)
    expect(family, source.shape, source)
    source.close()


@pytest.mark.parametrize("family", list(tiny.CONFIGS))
def test_weights_are_checked_without_torchs_compiler(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some operations on headers import it: 800 modules, a second of CPU in each engine."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    tiny.write_folder(tmp_path, family)
    source = open_checkpoint(tmp_path)
    check_weights(source.shape, source)
    source.close()


@pytest.mark.parametrize("parted", [0, 9], ids=["whole", "in parts"])
@pytest.mark.parametrize("family", list(tiny.CONFIGS))
def test_a_gguf_file_computes_what_transformers_does(
    tmp_path: Path, family: str, parted: int
) -> None:
    write_gguf(tmp_path / "m.gguf", family, part_tensors_max=parted)
    source = open_checkpoint(tmp_path)
    expect(family, source.shape, source)
    source.close()


@pytest.mark.parametrize("stretched", list(tiny.STRETCHED))
def test_a_stretched_context_is_computed_as_transformers_does(
    tmp_path: Path, stretched: str
) -> None:
    """Far past what the model would have been taught, and in the older form and today's."""
    tiny.write_folder(tmp_path, "qwen3", stretched)
    said = tiny.STRETCHED[stretched]
    source = SafetensorsFolder(tmp_path)
    shape = source.shape
    expect(stretched, shape, source)
    original = said.get("original_max_position_embeddings", 64)
    assert shape.context_tokens == said["factor"] * original
    source.close()
    config = tiny.config_of("qwen3")
    rope = {"rope_type": "yarn", "rope_theta": config.pop("rope_theta"), **said}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    today = SafetensorsFolder(tmp_path)
    assert today.shape == shape
    today.close()


def test_a_stretched_gguf_file_computes_what_transformers_does(tmp_path: Path) -> None:
    plain, tuned = (
        {
            "qwen3.rope.scaling.type": "yarn",
            "qwen3.rope.scaling.factor": said["factor"],
            "qwen3.rope.scaling.original_context_length": said["original_max_position_embeddings"],
        }
        for said in (tiny.STRETCHED["plain"], tiny.STRETCHED["tuned"])
    )
    tuned |= {
        f"qwen3.rope.scaling.yarn_beta_{end}": turns
        for end, turns in (("fast", 3.0), ("slow", 0.5))
    }
    tuned["qwen3.rope.scaling.yarn_attn_factor"] = 0.8
    linear, old = {"qwen3.rope.scaling.factor": 4.0}, {"qwen3.rope.scale_linear": 4.0}
    cases = (("plain", plain), ("tuned", tuned), ("linear", linear), ("linear", old))
    for stretched, metadata in cases:
        write_gguf(tmp_path / "m.gguf", "qwen3", metadata)
        source = GgufFile(tmp_path / "m.gguf")
        expect(stretched, source.shape, source)
        assert source.shape.context_tokens in (60, 64, 256)
        source.close()


def test_what_somebody_stretched_is_stretched_whatever_stood_there(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, "qwen3", "plain")
    config = json.loads((tmp_path / "config.json").read_text())
    stands = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": stands}))
    source = SafetensorsFolder(tmp_path)
    expect("plain", source.shape, source)
    source.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_config_as_transformers_writes_it_today_says_the_same(
    tmp_path: Path, family: str
) -> None:
    tiny.write_folder(tmp_path, family)
    before = SafetensorsFolder(tmp_path)
    config = tiny.config_of(family)
    rope = {"rope_type": "default", **config.pop("rope_scaling", {})}
    config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    today = SafetensorsFolder(tmp_path)
    assert today.shape == before.shape
    assert (today.shape.rope_scaling is not None) is (family == "llama")
    for source in (before, today):
        source.close()
    config["rope_parameters"]["rope_type"] = "longrope"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="rope scaling 'longrope' is unsupported"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("family", "said", "tokens"),
    [
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"use_sliding_window": False}, 8),
        ("qwen2", {"use_sliding_window": True}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 8),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 0}, None),
        # Qwen2 counts as many layers without a window as most of its models have.
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, None),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, 8),
        ("qwen3_moe", {"use_sliding_window": False, "max_window_layers": 0}, None),
    ],
)
def test_the_window_is_the_one_that_transformers_takes(
    tmp_path: Path, family: str, said: dict[str, Any], tokens: int | None
) -> None:
    tiny.write_folder(tmp_path, family)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "sliding_window": 8, "max_window_layers": 3, **said}
    if config["max_window_layers"] is None:
        del config["max_window_layers"]
    path.write_text(json.dumps(config))
    source = SafetensorsFolder(tmp_path)
    assert source.shape.window_tokens == tokens
    source.close()


@pytest.mark.parametrize(
    ("family", "fields", "tensors", "said"),
    [
        ("llama", {}, {"blk.1.attn_q.bias": 64}, "a bias of attn_q is unsupported"),
        ("qwen2", {}, {"blk.0.attn_output.bias": 32}, "a bias of attn_output is unsupported"),
        ("qwen3", {"qwen3.rope.scaling.type": "longrope"}, {}, "rope scaling 'longrope' is unsup"),
        ("qwen3", {"qwen3.rope.scaling.factor": -4.0}, {}, "by a factor of -4.0"),
    ],
)
def test_a_gguf_file_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], tensors: dict[str, int], said: str
) -> None:
    write_gguf(tmp_path / "m.gguf", family, fields, tensors)
    with pytest.raises(CheckpointError, match=said):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"num_hidden_layers": 4}, "lacks model.layers.3.input_layernorm"),
        ("llama", {"num_hidden_layers": 10**9}, "lacks model.layers.3.input_layernorm"),
        ("llama", {"intermediate_size": 2**39}, r"gate_proj.weight is \(48, 32\)"),
        ("llama", {"hidden_size": 2**60}, "cannot use a model of this shape"),
        ("llama", {"vocab_size": 2**39}, r"embed_tokens.weight is \(64, 32\)"),
        ("llama", {"rope_theta": -1.0}, "cannot use a model of this shape"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "with and without"),
        ("qwen2", {"num_key_value_heads": 1}, r"k_proj.weight is \(16, 32\)"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("qwen3_moe", {"num_experts": 7}, r"gate.weight is \(6, 32\)"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "layers without experts"),
        ("mixtral", {"num_local_experts": 0}, "of 0 experts"),
    ],
)
def test_a_config_that_lies_is_refused_before_memory_is_spent(
    tmp_path: Path, family: str, change: dict[str, object], said: str
) -> None:
    tiny.write_folder(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=said):
        check_weights((source := SafetensorsFolder(tmp_path)).shape, source)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, "llama")
    whole = {name: weights.long() for name, weights in tiny.weights_of("llama").items()}
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is I64, .* is expected"):
        check_weights((source := SafetensorsFolder(tmp_path)).shape, source)
