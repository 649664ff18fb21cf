"""The time of one engine step on given devices: a roofline, calibrated with published rates.

A decode step of a batch reads the weights it touches while it computes 2 operations per active
parameter and token, and takes the longer of the two. It then reads the batch's KV, and has a fixed
overhead and a small one per sequence. Prefill is compute only. Devices that split each layer
exchange activations twice a layer: in each step with a fixed time for an exchange, and in both with
the time of the bytes on the link. Every rate is the published peak of
the device class times the share that engines reach; `python -m ops.bench.planner_rates` compares
the result with published throughput.
"""

from math import log2
from typing import Final

import msgspec

from isochrone.wire.models.model import CatalogModel, ModelDimensions
from isochrone.wire.models.model_shape import (
    active_experts_share,
    active_parameters,
    sparse_share,
)
from scheduler.decide.capacity.device_classes import DeviceClass

BANDWIDTH_REACHED: Final = 0.75
"""The share of the published memory bandwidth that serving engines reach."""

TENSOR_REACHED_PER_DOUBLING: Final = 0.96
"""The share of the summed rates that remains per doubling of tensor parallelism, because the parts
of each product are smaller."""

EXCHANGES_PER_LAYER: Final = 2
"""After attention and after the feed-forward layers."""

EXCHANGE_S: Final = 50e-6
"""Time of an exchange of activations per doubling of tensor parallelism, beside that of its bytes:
to start it, and to wait for the slowest device."""

LINK_REACHED: Final = 0.8
"""The share of the published bandwidth between devices that an exchange reaches."""

ACTIVATION_BYTES: Final = 2
"""Bytes of an element that is exchanged."""

STEP_OVERHEAD_S: Final = 0.0015
"""Time of a step beside reading, computing and exchanges: launches."""

SEQUENCE_OVERHEAD_S: Final = 5e-6
"""Time of a step for each sequence of the batch: sampling, scheduling, detokenising."""

NODE_HOP_S: Final = 0.002
"""Added per hop from one node of a pipeline to the next, on the PoP's own network."""

ACTIVATION_TOKENS: Final = 8192
"""Tokens whose activations are held at once: a chunk of prefill."""

BATCH_MAX: Final = 512

CONTEXT_TOKENS: Final = 2048
ITL_TARGET_S: Final = 0.050
"""The mean context of a request, and the target for the time between tokens."""


class ParallelSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is spread over devices: tensor x pipeline, experts over the tensor group."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline}" + (f", EP{self.expert}" * (self.expert > 1))


def kv_spread(shape: ModelDimensions | None, split: ParallelSplit) -> float:
    """Return over how many devices the KV of one token and layer is spread."""
    if split.expert > 1:  # each device computes attention for its own sequences
        return split.expert
    if shape is None:
        return split.tensor
    return 1.0 if shape.latent_size else min(split.tensor, shape.kv_heads)


class StepTime:
    """The time of one engine step on given devices, by the roofline model."""

    def __init__(
        self,
        model: CatalogModel,
        kind: DeviceClass,
        split: ParallelSplit,
        nodes: int,
        kv_of_token: float,
        context_tokens: float = CONTEXT_TOKENS,
    ) -> None:
        """Estimate for sequences with a mean context of `context_tokens`.

        `kv_of_token` is the KV of one token over all layers, in bytes.
        """
        shape = model.shape
        bits = shape.weight_bits if shape else 16.0
        self._sparse_share = sparse_share(model)
        self._active_share = active_experts_share(shape)
        self._active_parameters = active_parameters(model)
        self._weights_bytes = model.weights_bytes
        # Devices that hold copies of a KV head each read it.
        copies = split.tensor / kv_spread(shape, split)
        self._kv_bytes = kv_of_token * context_tokens * copies
        self._context_tokens = context_tokens
        self._split = split
        self._hops_s = (nodes - 1) * NODE_HOP_S
        group = split.tensor * float(TENSOR_REACHED_PER_DOUBLING ** log2(split.tensor))
        # Weights packed into less than 8 bits are unpacked to 16 before they are multiplied.
        has_eight_bit = bits == 8 and kind.eight_bit_flops > 0
        flops = (
            kind.eight_bit_flops * kind.eight_bit_reached
            if has_eight_bit
            else kind.flops * kind.flops_reached
        )
        self._read_per_s = group * kind.bandwidth_bytes_per_s * BANDWIDTH_REACHED
        self._compute_per_s = group * flops
        exchanges = EXCHANGES_PER_LAYER * shape.layers if shape else 0
        self._exchange_s = exchanges * EXCHANGE_S * log2(split.tensor)
        # A ring sends twice what each device lacks of the sum.
        elements = 2 * (split.tensor - 1) / split.tensor * (shape.hidden_size if shape else 0)
        link_per_s = kind.link_bytes_per_s * LINK_REACHED
        self._exchange_s_per_token = exchanges * elements * ACTIVATION_BYTES / link_per_s

    def itl_s(self, batch: int) -> float:
        """Return the time between tokens: all pipeline stages, one after another."""
        # The share of experts that a batch activates when each token picks its own.
        active = 1 - (1 - self._active_share) ** batch if self._active_share < 1 else 1.0
        touched = self._weights_bytes * (1 - self._sparse_share * (1 - active))
        weights_s = touched / self._read_per_s
        compute_s = 2 * self._active_parameters * batch / self._compute_per_s
        kv_s = batch * self._kv_bytes / self._read_per_s
        exchange_s = self._exchange_s + batch * self._exchange_s_per_token
        overhead_s = STEP_OVERHEAD_S + batch * SEQUENCE_OVERHEAD_S + self._hops_s
        return max(weights_s, compute_s) + kv_s + exchange_s + overhead_s

    def largest_batch(self, kv_tokens: float) -> int:
        """Return the largest batch that fits in the KV cache and meets the ITL target."""
        stage_tokens = kv_tokens / self._split.pipeline
        high = max(1, int(min(BATCH_MAX, stage_tokens / self._context_tokens)))
        # If a single sequence misses the target, allow twice its time: that reaches nearly all the
        # throughput there is.
        target_s = max(ITL_TARGET_S, 2 * self.itl_s(1))
        low = 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.itl_s(middle) <= target_s else (low, middle - 1)
        return low

    def prefill_tokens_per_s(self) -> float:
        """Return the rate of prefill: all stages compute at once, each on its own chunk."""
        operations = 2 * max(1.0, self._active_parameters)
        token_s = operations / self._compute_per_s + self._exchange_s_per_token
        chunk_s = max(1.0, self._weights_bytes) / self._read_per_s
        return self._split.pipeline * min(1 / token_s, ACTIVATION_TOKENS / chunk_s)
