"""Published layouts of quantised weights: packed here by definition, one number at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.weights.checkpoint import open_checkpoint
from nodeagent.engine.weights.quantised_folder import QuantisedFolder
from ops.golden import tiny

NAME = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS = 64, 32
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Put the numbers of each row into 32-bit words, the first lowest unless an order is given."""
    rows, count = numbers.shape
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros(rows, count // per_word, dtype=torch.int64)
    for row in range(rows):
        for word in range(count // per_word):
            for place, which in enumerate(order):
                words[row, word] |= int(numbers[row, word * per_word + which]) << (place * bits)
    return words.to(torch.int32)


def drawn(bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [rows, columns], zeros and scales [rows, groups]."""
    generator = torch.Generator().manual_seed(bits + groups)
    numbers = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator)
    zeros = torch.randint(1, 1 << bits, (ROWS, groups), generator=generator)
    scales = torch.rand(ROWS, groups, generator=generator).half()
    return numbers, zeros, scales


def wide(numbers: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    return (numbers - zeros[:, group_of]) * scales.float()[:, group_of]


def write(folder: Path, quantisation: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config = {**tiny.config_of("llama"), "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def written(folder: Path, case: str) -> Tensor:
    """Write a matrix as `case` says; return it."""
    bits, group = (8 if "8" in case else 4), (COLUMNS if "channel" in case else 8)
    if case.endswith("32"):
        group = 32
    groups = COLUMNS // group
    numbers, zeros, scales = drawn(bits, groups)
    group_of = torch.arange(COLUMNS) // group
    if case.startswith("compressed"):
        strategy = {"strategy": "channel"} if "channel" in case else {"strategy": "group"}
        symmetric = "zeros" not in case
        tensors = {
            "weight_packed": packed(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([ROWS, COLUMNS]),
        }
        if symmetric:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        else:
            tensors["weight_zero_point"] = packed(zeros.T, bits).T
        config = compressed(num_bits=bits, symmetric=symmetric, group_size=group, **strategy)
    elif case.startswith("gptq"):
        if "order" in case:
            group_of = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1)) % groups
        less = 0 if "v2" in case else 1
        tensors = {
            "qweight": packed(numbers, bits).T,
            "qzeros": packed((zeros - less).T, bits),
            "scales": scales.T,
            "g_idx": group_of.int(),
        }
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True}
        if "v2" in case:
            config["checkpoint_format"] = "gptq_v2"
    else:
        tensors = {
            "qweight": packed(numbers.T, 4, AWQ),
            "qzeros": packed(zeros.T, 4, AWQ),
            "scales": scales.T,
        }
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    write(folder, config, tensors)
    return wide(numbers, zeros, scales, group_of)


CASES = [
    "compressed 4",
    "compressed 4 zeros",
    "compressed 4 zeros 32",
    "compressed 8 channel",
    "compressed 8 zeros",
    "gptq 4",
    "gptq 4 32",
    "gptq 4 order",
    "gptq 8",
    "gptq 4 v2",
    "awq 4",
    "awq 4 32",
]


@pytest.mark.parametrize("case", CASES)
def test_a_packed_matrix_is_read_as_it_was_written(tmp_path: Path, case: str) -> None:
    wanted = written(tmp_path, case)
    source = open_checkpoint(tmp_path)
    assert isinstance(source, QuantisedFolder)
    name = f"{NAME}.weight"
    assert source.has(name)
    assert not source.has("model.norm.weight")
    source.check(name, (ROWS, COLUMNS))
    assert torch.allclose(source.tensor(name, (ROWS, COLUMNS)), wanted, atol=1e-6, rtol=1e-6)
    rows = WeightSlice((ROWS, COLUMNS), 0, 16, 48)
    columns = WeightSlice((ROWS, COLUMNS), 1, 8, 24)
    assert torch.allclose(source.tensor(name, (ROWS, COLUMNS), rows), wanted[16:48], atol=1e-6)
    assert torch.allclose(source.tensor(name, (ROWS, COLUMNS), columns), wanted[:, 8:24], atol=1e-6)
    groups = source.groups(name, (ROWS, COLUMNS))
    # Kernels know groups of 32.
    assert (groups is not None) == (case.endswith("32") or "channel" in case)
    if groups is not None:
        assert torch.allclose(groups.dequantise(), wanted, atol=1e-5)
        part = source.groups(name, (ROWS, COLUMNS), rows)
        assert part is not None
        assert torch.allclose(part.dequantise(), wanted[16:48], atol=1e-5)
        assert source.groups(name, (ROWS, COLUMNS), columns) is None
    source.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes' of these bits is unknown"),
        ({"quant_method": "gptq", "bits": 3}, "'gptq' of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq'"),
        ({"quant_method": "fp8"}, "'fp8'"),
        (compressed(num_bits=4, strategy="tensor"), "'compressed-tensors' pack-quantized"),
        (compressed(num_bits=4, strategy="group", group_size=8, actorder="group"), "pack-quant"),
        (compressed(num_bits=4, strategy="group", group_size=8, type="float"), "pack-quant"),
        (
            {**compressed(num_bits=8, strategy="channel"), "format": "int-quantized"},
            "'compressed-tensors' int-quantized",
        ),
    ],
)
def test_an_unknown_scheme_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    write(tmp_path, config, {"weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def test_activations_that_are_quantised_too_are_refused(tmp_path: Path) -> None:
    config = compressed(num_bits=8, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    write(tmp_path, config, {"weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="with float activations"):
        open_checkpoint(tmp_path)


def test_packed_tensors_that_lie_are_refused(tmp_path: Path) -> None:
    name, group_of = f"{NAME}.weight", torch.zeros(COLUMNS, dtype=torch.int32)
    tensors = {
        "qweight": torch.zeros(4, ROWS, dtype=torch.int32),
        "qzeros": torch.zeros(4, 8, dtype=torch.int32),
        "scales": torch.ones(4, ROWS),
        "g_idx": group_of + 4,
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    write(tmp_path, config, tensors)
    source = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has 4 groups, g_idx names others"):
        source.tensor(name, (ROWS, COLUMNS))
    with pytest.raises(CheckpointError, match=r"qweight is \(4, 64\), \(8, 64\) is expected"):
        source.check(name, (ROWS, 64))
    with pytest.raises(CheckpointError, match="gptq, 4 bits, groups of 8 does not fit"):
        source.check(name, (ROWS, 12))
    source.close()
    write(tmp_path, config, {**tensors, "g_idx": group_of.float()})
    source = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="g_idx is F32, a whole number is expected"):
        source.check(name, (ROWS, COLUMNS))
    source.close()
