"""Mixtures of experts: Qwen3-MoE and Mixtral, which differ in the names of their weights."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.model.llama import Llama, LlamaMlp
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.model.weight_loader import WeightLoader


class ExpertMlp(LlamaMlp):
    """Sends each row to the experts that the router prefers, and sums their weighted outputs."""

    module_name = "mlp"
    gate_name, up_name, down_name = "gate_proj", "up_proj", "down_proj"

    def __init__(self, weights: WeightLoader, shape: DecoderShape, prefix: str) -> None:
        self._shape = shape
        self.row_ops = weights.row_ops
        prefix = f"{prefix}{self.module_name}."
        part_rows = {
            f"{name}.weight": shape.intermediate for name in (self.gate_name, self.up_name)
        }
        hidden, intermediate = shape.hidden, shape.intermediate
        self._router = weights.read(f"{prefix}gate.weight", shape.experts, hidden)
        # An expert sees only some rows of the batch, so it takes no adapters; the sum over ranks
        # follows once for all experts.
        expert_weights = weights.without_adapters()
        self._sum = weights.communicator.all_reduce
        assert weights.shard is not None
        self._local_experts = weights.shard.experts
        prefixes = [f"{prefix}experts.{expert}." for expert in self._local_experts]
        self._gates_ups = [
            expert_weights.linear_stack(expert, part_rows, hidden) for expert in prefixes
        ]
        self._downs = [
            expert_weights.linear(f"{expert}{self.down_name}.weight", hidden, intermediate)
            for expert in prefixes
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row of `x` by its own experts."""
        shares = linear(x, self._router).float().softmax(-1)
        shares, chosen = shares.topk(self._shape.experts_per_token)
        if self._shape.shares_normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        output = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            if expert not in self._local_experts:
                continue
            local = expert - self._local_experts.start
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            gated = self.row_ops.silu_gate(self._gates_ups[local](x[rows]))
            output.index_add_(0, rows, self._downs[local](gated) * shares[rows, rank, None])
        return self._sum(output)


class MixtralExpertMlp(ExpertMlp):
    """The same with Mixtral's names."""

    module_name = "block_sparse_moe"
    gate_name, up_name, down_name = "w1", "w3", "w2"


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    mlp = ExpertMlp


class Mixtral(Llama):
    """Mistral's architecture with experts."""

    mlp = MixtralExpertMlp
