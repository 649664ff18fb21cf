"""Capacity of one replica on given devices: whether it fits, its KV cache, its rates.

Rule 1: measured rates override every estimate.
Rule 2: a replica that cannot fit is refused with the arithmetic, so that an operator can check it.

The estimate is the roofline of `step_time.py`. Weights and KV are split over devices by tensor,
pipeline and expert parallelism: tensor within a node, pipeline over nodes of one PoP.
"""

from collections.abc import Iterator, Mapping
from math import ceil, log2
from statistics import fmean
from typing import Final

import msgspec

from isochrone.wire.engines.engine_capabilities import KV_TYPE_BITS, capabilities_of, copies_of
from isochrone.wire.engines.engine_options import TRUE
from isochrone.wire.kv.kv_store import store_bytes
from isochrone.wire.models import model_shape
from isochrone.wire.models.model import CatalogModel, Deployment, EngineSettings, ModelDimensions
from isochrone.wire.models.model_shape import sparse_share
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.capacity.device_classes import CPU, GIB, DeviceClass, class_of
from scheduler.decide.capacity.step_time import (
    ACTIVATION_TOKENS,
    CONTEXT_TOKENS,
    ITL_TARGET_S,
    ParallelSplit,
    StepTime,
    kv_spread,
)
from scheduler.decide.cluster import TOKENS_IN_FLIGHT_UNKNOWN

DEVICES_MAX: Final = 64

KV_UNKNOWN_BYTES: Final = 512 * 1024 * 1024
"""The least KV cache of a model whose KV per token is not known."""

KV_BITS_UNKNOWN: Final = 16.0
"""The size of a cached value of a model without dimensions, for which a catalogue entry states the
KV of a token."""

RATE_MIN: Final = 1e-3
RATE_MAX: Final = 1e9
"""Tokens/s: a rate outside this range is a measuring error, and dividing by it may overflow."""

UNMEASURED: Final = ReplicaProfile(prefill_tokens_per_s=400.0, decode_tokens_per_s=40.0)
"""Rates assumed for an unknown class without measurements: those of a small model on a few CPU
cores. An estimate that is too low adds a replica, one that is too high leaves requests waiting."""

Profiles = Mapping[tuple[str, str], ReplicaProfile]
"""Measured rates by model and device class."""


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
        _capacity_of(model, engine, kind, split, nodes)
        for split in _splits_of_copy(model, engine, devices, nodes)
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
    return (
        RATE_MIN <= profile.prefill_tokens_per_s <= RATE_MAX
        and RATE_MIN <= profile.decode_tokens_per_s <= RATE_MAX
    )


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


def whole_copies(model: CatalogModel, engine: EngineSettings) -> int:
    """Return how many copies of the model a replica has that share no weights.

    Copies with common experts count as one: `ParallelSplit.expert` is their layout.
    """
    return 1 if _shares_experts(model, engine) else copies_of(engine)


def _shares_experts(model: CatalogModel, engine: EngineSettings) -> bool:
    option = capabilities_of(engine.driver).shared_experts_option
    has_experts = model.shape is not None and model.shape.experts > 0
    return has_experts and engine.options.get(option, "false").lower() in TRUE


def _splits_of_copy(
    model: CatalogModel, engine: EngineSettings, devices: int, nodes: int
) -> Iterator[ParallelSplit]:
    """Yield every split of one copy over its part of a replica's devices."""
    copies = whole_copies(model, engine)
    if devices % copies == 0:
        yield from splits(model.shape, devices // copies, nodes)


def _divides(shape: ModelDimensions, tensor: int) -> bool:
    """Say whether attention heads divide over `tensor` devices. KV heads are split, or copied to
    several devices."""
    kv_heads = 1 if shape.latent_size else shape.kv_heads
    return shape.heads % tensor == 0 and max(kv_heads, tensor) % min(kv_heads, tensor) == 0


def kv_bytes_per_token(model: CatalogModel, engine: EngineSettings) -> float:
    """Return the KV bytes of a token of context over all layers, averaged over a whole context."""
    bits = own_bits = model.shape.kv_bits if model.shape else KV_BITS_UNKNOWN
    options = capabilities_of(engine.driver).kv_type_options
    if kinds := [engine.options.get(name, "") for name in options]:
        bits = fmean(KV_TYPE_BITS.get(kind, own_bits) for kind in kinds)
    if model.shape is None:
        return model.kv_bytes_per_token * bits / own_bits
    shape = msgspec.structs.replace(model.shape, kv_bits=bits)
    return model_shape.kv_bytes_per_token(shape, CONTEXT_TOKENS)


def has_kv_cache(model: CatalogModel, engine: EngineSettings) -> bool:
    """Say whether a replica's engine needs memory for KV."""
    return model.kind == "chat" and capabilities_of(engine.driver).has_kv_cache


def context_tokens_of(model: CatalogModel, engine: EngineSettings) -> int:
    """Return the largest context of a request, in tokens."""
    return min(engine.context_tokens_max, model.context_tokens)


def stored_kv_bytes_per_token(
    model: CatalogModel, engine: EngineSettings, device_class: str
) -> float:
    """Return the KV bytes of a token on a device class."""
    stored = kv_bytes_per_token(model, engine)
    able = capabilities_of(engine.driver)
    has_own_type = any(name in engine.options for name in able.kv_type_options)
    if device_class != CPU or not able.cpu_kv_bits or has_own_type:
        return stored
    own_bits = model.shape.kv_bits if model.shape else KV_BITS_UNKNOWN
    return stored * able.cpu_kv_bits / own_bits


def kv_minimum_bytes(model: CatalogModel, engine: EngineSettings) -> int:
    """Return the least KV cache on each device with which an engine starts: one whole context."""
    if not has_kv_cache(model, engine):
        return 0
    # The class is not known here: a CPU's is the larger.
    stored = stored_kv_bytes_per_token(model, engine, CPU)
    if not stored:
        return KV_UNKNOWN_BYTES
    return ceil(context_tokens_of(model, engine) * stored / kv_parts(model, engine))


def kv_parts(model: CatalogModel, engine: EngineSettings) -> int:
    """Return over how many devices of a replica the KV of a token is divided."""
    devices, shape = max(1, engine.devices // copies_of(engine)), model.shape
    if shape is None:
        return devices
    heads = 1 if shape.latent_size else shape.kv_heads
    return max(1, min(devices, heads * engine.nodes))


def weights_bytes_per_device(model: CatalogModel, engine: EngineSettings) -> int:
    """Return the bytes of weights on each device of a replica, all copies of them together."""
    shared_bytes = (
        int(model.weights_bytes * sparse_share(model)) if _shares_experts(model, engine) else 0
    )
    return (
        shared_bytes + copies_of(engine) * (model.weights_bytes - shared_bytes)
    ) // engine.devices


def overhead_bytes(model: CatalogModel, engine: EngineSettings) -> int:
    """Return an engine's memory on each device beside weights and KV.

    The sum of the engine's own memory, its CUDA graphs, and activations; `extra_bytes` of the model
    are what agents measured beyond that. The memory that a replica gives to a store of KV counts on
    every device, because on a CPU it is the same memory.
    """
    of_engine = capabilities_of(engine.driver)
    has_graphs = engine.options.get(of_engine.no_graphs_option, "false").lower() not in TRUE
    fixed = of_engine.overhead_bytes + (of_engine.graph_bytes if has_graphs else 0)
    fixed += model.extra_bytes + store_bytes(engine)
    if model.shape is None:
        return fixed
    # Hidden states of a chunk, their residual and the widest inner layer, at 16 bits.
    return fixed + ACTIVATION_TOKENS * model.shape.hidden_size * 6 * 2


def _weights_per_device(model: CatalogModel, split: ParallelSplit) -> int:
    """Return the bytes of weights on the fullest device. With expert parallelism each device holds
    the attention weights."""
    shape = model.shape
    if shape is None or split.expert == 1 or not shape.parameters:
        return -(-model.weights_bytes // (split.tensor * split.pipeline))
    sparse = model.weights_bytes * min(1.0, shape.expert_parameters / shape.parameters)
    dense = model.weights_bytes - sparse
    return int((dense + sparse / split.expert) / split.pipeline) + 1


def _capacity_of(
    model: CatalogModel, engine: EngineSettings, kind: DeviceClass, split: ParallelSplit, nodes: int
) -> ReplicaCapacity | None:
    weights = _weights_per_device(model, split)
    overhead = overhead_bytes(model, engine)
    left = kind.memory_bytes - weights - overhead
    if left < (engine.kv_memory_bytes or kv_minimum_bytes(model, engine)):
        return None
    kv = engine.kv_memory_bytes or left
    kv_of_token = kv_bytes_per_token(model, engine)
    per_device = kv_of_token / split.pipeline / kv_spread(model.shape, split)
    unknown = engine.tokens_in_flight_max or TOKENS_IN_FLIGHT_UNKNOWN
    kv_tokens = int(kv / per_device) if per_device else unknown
    if kv_tokens < 1:
        return None
    step = StepTime(model, kind, split, nodes, kv_of_token)
    batch = step.largest_batch(kv_tokens)
    itl_s = step.itl_s(batch)
    copies = whole_copies(model, engine)
    return ReplicaCapacity(
        split=split,
        weights_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=kv,
        kv_tokens=copies * kv_tokens,
        prefill_tokens_per_s=copies * step.prefill_tokens_per_s(),
        # A full pipeline has one batch in each stage.
        decode_tokens_per_s=copies * batch * split.pipeline / itl_s,
        itl_s=itl_s,
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
    tried = list(_splits_of_copy(model, engine, devices, nodes))
    copies = whole_copies(model, engine)
    each = f" for each of {copies} copies" if copies > 1 else ""
    if not tried:
        heads = f"{model.shape.heads} heads and {model.shape.layers} layers" if model.shape else ""
        return (
            f"cannot split {model.model_id} over {devices} devices on {nodes} nodes{each}: "
            f"{heads or 'devices'} do not divide by them; use another number of devices"
        )
    weights = min(_weights_per_device(model, split) for split in tried)
    overhead, memory = overhead_bytes(model, engine), kind.memory_bytes
    kv = engine.kv_memory_bytes or kv_minimum_bytes(model, engine)
    short = weights + overhead + kv - memory
    lacking = "nothing is left for a token of KV cache" if short <= 0 else f"{gib(short)} too much"
    layout = f"{nodes} x ({devices // nodes} x {gib(memory)})" if nodes > 1 else ""
    left = memory - overhead - kv
    of_all = copies * max(1, model.weights_bytes)
    enough = 2 ** max(0, ceil(log2(of_all / left))) if left > 0 else 0
    total = gib(weights + overhead + kv)
    return (
        f"cannot fit {model.model_id} on {layout or f'{devices} x {gib(memory)}'}: weights "
        f"{gib(model.weights_bytes)} / {devices // copies}{each} = {gib(weights)}"
        f" + engine {gib(overhead)}"
        f" + KV cache {gib(kv)} = {total} on each device, {lacking}"
        + (f"; {enough} such devices would hold it" if enough > devices else "")
    )


def gib(size_bytes: float) -> str:
    """Return a size as text in GiB; one below a hundredth of it in MiB, rounded up."""
    if 0 < size_bytes < GIB / 100:
        return f"{ceil(size_bytes / 2**20)} MiB"
    return f"{size_bytes / GIB:.2f} GiB"
