"""Mixtures of experts: Qwen3-MoE and Mixtral, which differ in what they call their weights."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from nodeagent.engine.model.layers.gated_mlp import gated
from nodeagent.engine.model.llama import Llama, LlamaMlp
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.weights.weight_loading import Weights


class Mixture(LlamaMlp):
    """Sends each row to the experts that its router prefers, and adds up their answers."""

    room = "mlp"
    gate_name, up_name, down_name = "gate_proj", "up_proj", "down_proj"

    def __init__(self, weights: Weights, shape: ModelShape, prefix: str) -> None:
        self._shape = shape
        prefix = f"{prefix}{self.room}."
        parts = {f"{name}.weight": shape.intermediate for name in (self.gate_name, self.up_name)}
        hidden, wide = shape.hidden, shape.intermediate
        self._router = weights.read(f"{prefix}gate.weight", shape.experts, hidden)
        bare = weights.bare()
        self._sum = weights.ranks.sum
        assert weights.share is not None
        self._experts = weights.share.experts
        experts = [f"{prefix}experts.{number}." for number in self._experts]
        self._gates_ups = [bare.linear_stack(expert, parts, hidden) for expert in experts]
        self._downs = [
            bare.linear(f"{expert}{self.down_name}.weight", hidden, wide) for expert in experts
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row of `x` by its own experts."""
        shares = linear(x, self._router).float().softmax(-1)
        shares, chosen = shares.topk(self._shape.experts_per_token)
        if self._shape.shares_normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        answer = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            if expert not in self._experts:
                continue
            here = expert - self._experts.start
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            added = self._downs[here](gated(self._gates_ups[here](x[rows])))
            answer.index_add_(0, rows, added * shares[rows, place, None])
        return self._sum(answer)


class MixtralMixture(Mixture):
    """The same under Mixtral's names."""

    room = "block_sparse_moe"
    gate_name, up_name, down_name = "w1", "w3", "w2"


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    mlp = Mixture


class Mixtral(Llama):
    """Mistral's architecture with experts."""

    mlp = MixtralMixture
