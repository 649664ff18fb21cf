"""Capacity of one replica on given devices: whether it fits, its KV cache, its rates.

Rule 1: measured rates override every estimate.
Rule 2: a replica that cannot fit is refused with the arithmetic, so that an operator can check it.

The estimate is a roofline. A decode step of a batch takes the longer of reading (the weights it
touches and the batch's KV, over memory bandwidth) and computing (2 operations per active parameter
and token); prefill is compute only. Weights and KV are split over devices by tensor, pipeline and
expert parallelism: tensor within a node, pipeline over nodes of one PoP.
"""

from collections.abc import Iterator, Mapping
from math import ceil, log2
from typing import Final

import msgspec

from isochrone.wire import model_shape
from isochrone.wire.model import CatalogModel, Deployment, EngineSettings, ModelDimensions
from isochrone.wire.report import ReplicaProfile
from scheduler.decide.capacity.device_classes import GIB, DeviceClass, class_of

ENGINE_OVERHEAD_BYTES: Final = 256 * 1024 * 1024
"""Memory of a small engine beside weights and KV cache: code, a CUDA context."""

ACTIVATION_TOKENS: Final = 8192
"""Tokens whose activations are held at once: a chunk of prefill."""

BANDWIDTH_REACHED: Final = 0.70
FLOPS_REACHED: Final = 0.45
"""The shares of published peaks that serving engines reach."""

TENSOR_REACHED_PER_DOUBLING: Final = 0.90
"""The share of the summed rates that remains per doubling of tensor parallelism, because devices
exchange activations."""

STEP_OVERHEAD_S: Final = 0.0025
"""Time of a step beside reading and computing: launches, sampling, latency of the exchange."""

NODE_HOP_S: Final = 0.002
"""Added per hop from one node of a pipeline to the next, on the PoP's own network."""

BATCH_MAX: Final = 512
DEVICES_MAX: Final = 64

KV_OPTIONS: Final = ("kv_dtype", "kv_cache_dtype")
"""Names that engines give to the option for the type of the KV cache."""

CONTEXT_TOKENS: Final = 2048
ITL_TARGET_S: Final = 0.050
"""The mean context of a request, and the target for the time between tokens."""

RATE_MIN: Final = 1e-3
RATE_MAX: Final = 1e9
"""Tokens/s: a rate outside this range is a measuring error, and dividing by it may overflow."""

UNMEASURED: Final = ReplicaProfile(prefill_tokens_per_s=400.0, decode_tokens_per_s=40.0)
"""Rates assumed for an unknown class without measurements: those of a small model on a few CPU
cores. An estimate that is too low adds a replica, one that is too high leaves requests waiting."""

Profiles = Mapping[tuple[str, str], ReplicaProfile]
"""Measured rates by model and device class."""


class ParallelSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is spread over devices: tensor x pipeline, experts over the tensor group."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline}" + (f", EP{self.expert}" * (self.expert > 1))


class ReplicaCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated capacity of a replica. Bytes are per device."""

    split: ParallelSplit
    weights_bytes: int
    overhead_bytes: int
    kv_bytes: int
    kv_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    itl_s: float


class CannotFit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica does not fit on given devices, with the arithmetic."""

    reason: str


def replica_capacity(
    model: CatalogModel,
    engine: EngineSettings,
    kind: DeviceClass,
    *,
    devices: int = 0,
    nodes: int = 0,
) -> ReplicaCapacity | CannotFit:
    """Return what a replica carries on `devices` of `kind` over `nodes`, with its best split.

    `devices` and `nodes` default to the engine's settings.
    """
    devices, nodes = devices or engine.devices, nodes or engine.nodes

    def rank(capacity: ReplicaCapacity) -> tuple[bool, float, float]:
        in_time = capacity.itl_s <= ITL_TARGET_S
        return (in_time, capacity.decode_tokens_per_s, capacity.prefill_tokens_per_s)

    tried = (
        _capacity_of(model, engine, kind, s, nodes) for s in splits(model.shape, devices, nodes)
    )
    best = max((capacity for capacity in tried if capacity), key=rank, default=None)
    return best or CannotFit(reason=_why_too_small(model, engine, kind, devices, nodes))


def replica_rates(
    device_class: str, deployment: Deployment, model: CatalogModel, profiles: Profiles
) -> ReplicaProfile:
    """Return the rates of a replica on a device class: measured, else estimated, else assumed."""
    measured = profiles.get((model.model_id, device_class))
    if measured and is_measured(measured):
        return measured
    kind = class_of(device_class)
    estimated = replica_capacity(model, deployment.engine, kind) if kind else None
    if isinstance(estimated, ReplicaCapacity):
        return ReplicaProfile(
            prefill_tokens_per_s=estimated.prefill_tokens_per_s,
            decode_tokens_per_s=estimated.decode_tokens_per_s,
        )
    known = [
        profile
        for (model_id, _), profile in profiles.items()
        if model_id == model.model_id and is_measured(profile)
    ]
    return min(known, key=lambda p: p.decode_tokens_per_s, default=UNMEASURED)


def is_measured(profile: ReplicaProfile) -> bool:
    """Say whether a profile has both rates, within the plausible range."""
    rates = profile.prefill_tokens_per_s, profile.decode_tokens_per_s
    return all(RATE_MIN <= rate <= RATE_MAX for rate in rates)


def splits(shape: ModelDimensions | None, devices: int, nodes: int = 1) -> Iterator[ParallelSplit]:
    """Yield every split over `devices` that the model's heads, layers and experts allow."""
    per_node = devices // nodes
    if per_node * nodes != devices:
        return
    for tensor in range(1, per_node + 1):
        if per_node % tensor or (shape and not _divides(shape, tensor)):
            continue
        pipeline = devices // tensor
        if shape and pipeline > shape.layers:
            continue
        yield ParallelSplit(tensor=tensor, pipeline=pipeline)
        if shape and shape.experts and tensor > 1 and shape.experts % tensor == 0:
            yield ParallelSplit(tensor=tensor, pipeline=pipeline, expert=tensor)


def _divides(shape: ModelDimensions, tensor: int) -> bool:
    """Say whether attention heads divide over `tensor` devices. KV heads are split, or copied to
    several devices."""
    kv_heads = 1 if shape.latent_size else shape.kv_heads
    return shape.heads % tensor == 0 and max(kv_heads, tensor) % min(kv_heads, tensor) == 0


def kv_bytes_per_token(model: CatalogModel, engine: EngineSettings) -> float:
    """Return the KV bytes of a token of context over all layers, averaged over a whole context."""
    if model.shape is None:
        return float(model.kv_bytes_per_token)
    shape = model.shape
    if any(engine.options.get(name, "").startswith("fp8") for name in KV_OPTIONS):
        shape = msgspec.structs.replace(shape, kv_bits=8.0)
    return model_shape.kv_bytes_per_token(shape, CONTEXT_TOKENS)


def overhead_bytes(model: CatalogModel) -> int:
    """Return an engine's memory on each device beside weights and KV: CUDA context, activations."""
    if model.shape is None:
        return ENGINE_OVERHEAD_BYTES
    # Hidden states of a chunk, their residual and the widest inner layer, at 16 bits.
    activations = ACTIVATION_TOKENS * model.shape.hidden_size * 6 * 2
    return ENGINE_OVERHEAD_BYTES + activations


def _weights_per_device(model: CatalogModel, split: ParallelSplit) -> int:
    """Return the bytes of weights on the fullest device. With expert parallelism each device holds
    the attention weights."""
    shape = model.shape
    if shape is None or split.expert == 1 or not shape.parameters:
        return -(-model.weights_bytes // (split.tensor * split.pipeline))
    sparse = model.weights_bytes * min(1.0, shape.expert_parameters / shape.parameters)
    dense = model.weights_bytes - sparse
    return int((dense + sparse / split.expert) / split.pipeline) + 1


def _kv_spread(shape: ModelDimensions | None, split: ParallelSplit) -> float:
    """Return over how many devices the KV of one token and layer is spread."""
    if split.expert > 1:  # each device computes attention for its own sequences
        return split.expert
    if shape is None:
        return split.tensor
    return 1.0 if shape.latent_size else min(split.tensor, shape.kv_heads)


def _capacity_of(
    model: CatalogModel, engine: EngineSettings, kind: DeviceClass, split: ParallelSplit, nodes: int
) -> ReplicaCapacity | None:
    weights = _weights_per_device(model, split)
    overhead = overhead_bytes(model)
    left = kind.memory_bytes - weights - overhead
    if left < engine.kv_memory_bytes:
        return None
    kv = engine.kv_memory_bytes or left
    kv_of_token = kv_bytes_per_token(model, engine)
    per_device = kv_of_token / split.pipeline / _kv_spread(model.shape, split)
    kv_tokens = int(kv / per_device) if per_device else engine.tokens_in_flight_max
    if kv_tokens < 1:
        return None
    step = _StepTime(model, kind, split, nodes, kv_of_token)
    batch = step.largest_batch(kv_tokens)
    itl_s = step.itl_s(batch)
    return ReplicaCapacity(
        split=split,
        weights_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=kv,
        kv_tokens=kv_tokens,
        prefill_tokens_per_s=step.prefill_tokens_per_s(),
        # A full pipeline has one batch in each stage.
        decode_tokens_per_s=batch * split.pipeline / itl_s,
        itl_s=itl_s,
    )


class _StepTime:
    """The time of one engine step on given devices, by the roofline model."""

    def __init__(
        self,
        model: CatalogModel,
        kind: DeviceClass,
        split: ParallelSplit,
        nodes: int,
        kv_of_token: float,
    ) -> None:
        shape = model.shape
        bits = shape.weight_bits if shape else 16.0
        self._parameters = (shape.parameters if shape else 0) or model.weights_bytes * 8 / bits
        sparse = shape.expert_parameters if shape else 0
        self._sparse_share = min(1.0, sparse / max(1.0, self._parameters))
        self._active_share = (
            shape.experts_active / shape.experts if shape and shape.experts else 1.0
        )
        self._weights_bytes = model.weights_bytes
        # Devices that hold copies of a KV head each read it.
        copies = split.tensor / _kv_spread(shape, split)
        self._kv_bytes = kv_of_token * CONTEXT_TOKENS * copies
        self._split = split
        self._hops_s = (nodes - 1) * NODE_HOP_S
        group = split.tensor * float(TENSOR_REACHED_PER_DOUBLING ** log2(split.tensor))
        # Weights packed into less than 8 bits are unpacked to 16 before they are multiplied.
        arithmetic = kind.eight_bit_flops if bits == 8 and kind.eight_bit_flops else kind.flops
        self._read_per_s = group * kind.bandwidth_bytes_per_s * BANDWIDTH_REACHED
        self._compute_per_s = group * arithmetic * FLOPS_REACHED

    @property
    def _active_parameters(self) -> float:
        inactive = self._sparse_share * (1 - self._active_share)
        return self._parameters * (1 - inactive)

    def itl_s(self, batch: int) -> float:
        """Return the time between tokens: all pipeline stages, one after another."""
        # The share of experts that a batch activates when each token picks its own.
        active = 1 - (1 - self._active_share) ** batch if self._active_share < 1 else 1.0
        touched = self._weights_bytes * (1 - self._sparse_share * (1 - active))
        read = (touched + batch * self._kv_bytes) / self._read_per_s
        compute = 2 * self._active_parameters * batch / self._compute_per_s
        return max(read, compute) + STEP_OVERHEAD_S + self._hops_s

    def largest_batch(self, kv_tokens: int) -> int:
        """Return the largest batch that fits in the KV cache and meets the ITL target."""
        stage_tokens = kv_tokens // self._split.pipeline
        batch_max = max(1, min(BATCH_MAX, stage_tokens // CONTEXT_TOKENS))
        # If a single sequence misses the target, allow twice its time: that reaches nearly all the
        # throughput there is.
        target_s = max(ITL_TARGET_S, 2 * self.itl_s(1))
        low, high = 1, batch_max
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.itl_s(middle) <= target_s else (low, middle - 1)
        return low

    def prefill_tokens_per_s(self) -> float:
        """Return the rate of prefill: all stages compute at once, each on its own chunk."""
        rate = self._compute_per_s * self._split.pipeline / (2 * max(1.0, self._active_parameters))
        return min(
            rate,
            self._read_per_s
            * self._split.pipeline
            * ACTIVATION_TOKENS
            / max(1.0, self._weights_bytes),
        )


def devices_needed(
    model: CatalogModel, engine: EngineSettings, kind: DeviceClass, per_node: int = 64
) -> int:
    """Return the fewest devices of a class that hold a replica, or 0 if DEVICES_MAX do not.

    More than `per_node` devices are spread over several nodes.
    """
    devices = 1
    while devices <= DEVICES_MAX:
        nodes = max(1, devices // per_node)
        if not isinstance(
            replica_capacity(model, engine, kind, devices=devices, nodes=nodes), CannotFit
        ):
            return devices
        devices *= 2
    return 0


def _why_too_small(
    model: CatalogModel, engine: EngineSettings, kind: DeviceClass, devices: int, nodes: int
) -> str:
    tried = list(splits(model.shape, devices, nodes))
    if not tried:
        heads = f"{model.shape.heads} heads and {model.shape.layers} layers" if model.shape else ""
        return (
            f"cannot split {model.model_id} over {devices} devices on {nodes} nodes: "
            f"{heads or 'devices'} do not divide by them; use another number of devices"
        )
    weights = min(_weights_per_device(model, split) for split in tried)
    overhead, memory = overhead_bytes(model), kind.memory_bytes
    kv = engine.kv_memory_bytes
    short = weights + overhead + kv - memory
    lacking = "nothing is left for a token of KV cache" if short <= 0 else f"{gib(short)} too much"
    layout = f"{nodes} x ({devices // nodes} x {gib(memory)})" if nodes > 1 else ""
    left = memory - overhead - kv
    enough = 2 ** max(0, ceil(log2(max(1, model.weights_bytes) / left))) if left > 0 else 0
    total = gib(weights + overhead + kv)
    return (
        f"cannot fit {model.model_id} on {layout or f'{devices} x {gib(memory)}'}: weights "
        f"{gib(model.weights_bytes)} / {devices} = {gib(weights)} + engine {gib(overhead)}"
        f" + KV cache {gib(kv)} = {total} on each device, {lacking}"
        + (f"; {enough} such devices would hold it" if enough > devices else "")
    )


def gib(size_bytes: float) -> str:
    """Return a size as text in GiB."""
    return f"{size_bytes / GIB:.2f} GiB"
