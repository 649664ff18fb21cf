"""The sizes of a replica that its deployment leaves open: KV cache, tokens in flight, batch.

Rule 1: a size that a deployment sets is kept. A size of 0, or an option that is not given, is
derived.
Rule 2: a replica without a KV size is placed with the least it can start with (one whole context),
so that the search for slots needs no device. Then it gets the memory that is left on its devices,
up to what a full batch of its class can use; new replicas on one device share this memory.
Rule 3: the result is in the replica's spec, so that the agent, the engine and the routers use the
sizes that were planned.
"""

from math import ceil, inf
from typing import Final

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine_capabilities import capabilities_of, copies_of
from isochrone.wire.engines.engine_options import read_size
from isochrone.wire.models.model import CatalogModel, EngineSettings
from scheduler.decide.capacity.device_classes import CPU, GIB, class_of
from scheduler.decide.capacity.replica_capacity import (
    CannotFit,
    ReplicaCapacity,
    context_tokens_of,
    has_kv_cache,
    kv_minimum_bytes,
    kv_parts,
    overhead_bytes,
    replica_capacity,
    stored_kv_bytes_per_token,
    weights_bytes_per_device,
    whole_copies,
)
from scheduler.decide.capacity.step_time import (
    BATCH_MAX,
    CONTEXT_TOKENS,
    StepTime,
)
from scheduler.decide.cluster import TOKENS_IN_FLIGHT_UNKNOWN

SHORT_CONTEXT_TOKENS: Final = 512
"""The context of short requests, for which the limit of concurrent sequences is made: longer ones
are limited by tokens in flight."""

SEQUENCES_UNKNOWN: Final = 16
STEP_TOKENS_UNKNOWN: Final = 256
"""The sizes on a CPU, whose rates are not known: those of a few cores."""

GPU_SEQUENCES_UNKNOWN: Final = 256
GPU_STEP_TOKENS_UNKNOWN: Final = 2048
"""The sizes on a GPU where rates cannot be estimated, because its class is not listed or the model
has no dimensions: vLLM's own defaults for GPUs of less than 70 GiB."""

STEP_TARGET_S: Final = 0.25
STEP_TOKENS_MIN: Final = 256
STEP_TOKENS_MAX: Final = 8192
"""A step prefills the tokens that the device computes in this time, within these limits."""

INTERVAL_OPTION: Final = "interval_ms"
"""The embedded engine's limit of a step that reads prompts while answers are generated."""

SLOTS_MAX: Final = 32
"""The most sequences of an engine that gives each sequence a part of the KV cache."""

WAITING_PER_SEQUENCE: Final = 4
"""How many requests may wait in an engine that is fair between tenants, per sequence."""


class ReplicaSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one replica. `memory_bytes` and `kv_bytes` are of each device, `sequences` and
    `step_tokens` of each copy of the model.

    `kv_tokens` is 0 where the KV of a token is not known.
    """

    device_class: str
    memory_bytes: int
    kv_bytes: int
    kv_tokens: int
    tokens_in_flight: int
    sequences: int
    step_tokens: int
    context_tokens: int = 0
    model_context_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


def derives_kv(model: CatalogModel, engine: EngineSettings) -> bool:
    """Return whether a replica's KV cache is what is left on its devices."""
    return not engine.kv_memory_bytes and not engine.memory_bytes and has_kv_cache(model, engine)


def replica_sizes(
    model: CatalogModel, engine: EngineSettings, device_class: str, memory_bytes: int
) -> ReplicaSizes:
    """Return the sizes of a replica that may take `memory_bytes` of each of its devices."""
    capacity = _capacity_within(model, engine, device_class, memory_bytes)
    fixed_bytes = weights_bytes_per_device(model, engine) + overhead_bytes(model, engine)
    kv_bytes, kv_tokens, copies = engine.kv_memory_bytes, 0, copies_of(engine)
    context = context_tokens_of(model, engine)
    kv_of_token = stored_kv_bytes_per_token(model, engine, device_class) / kv_parts(model, engine)
    if not kv_bytes and has_kv_cache(model, engine):
        least = kv_minimum_bytes(model, engine)
        kv_bytes = max(least, memory_bytes - fixed_bytes)
        if derives_kv(model, engine) and kv_of_token:
            batch = _largest_batch(
                model, engine, device_class, capacity, context_tokens=CONTEXT_TOKENS
            )
            tokens = max(batch * min(CONTEXT_TOKENS, context) / copies, context)
            kv_bytes = max(least, min(kv_bytes, ceil(tokens * kv_of_token)))
    if kv_of_token and kv_bytes:
        kv_tokens = copies * int(kv_bytes / kv_of_token)
    sequences = _largest_batch(
        model,
        engine,
        device_class,
        capacity,
        context_tokens=SHORT_CONTEXT_TOKENS,
        kv_tokens=kv_tokens or float("inf"),
    )
    names = capabilities_of(engine.driver)
    if not names.sequences_share_kv and kv_tokens:
        sequences = max(1, min(sequences, SLOTS_MAX, kv_tokens // context))
    in_flight = min(kv_tokens, sequences * context) if kv_tokens else TOKENS_IN_FLIGHT_UNKNOWN
    rates = capacity if isinstance(capacity, ReplicaCapacity) else None
    given_sequences = parse_digits(engine.options.get(names.sequences_option, "")) or 0
    given_tokens = parse_digits(engine.options.get(names.step_tokens_option, "")) or 0
    sequences, step_tokens = ceil(sequences / copies), _step_tokens(rates, device_class, copies)
    # Engines do not start with fewer tokens a step than sequences: what is open follows the other.
    if given_tokens:
        sequences = min(sequences, max(1, given_tokens - 1))
    if given_sequences:
        step_tokens = max(step_tokens, 1 << given_sequences.bit_length())
    return ReplicaSizes(
        device_class=device_class,
        memory_bytes=engine.memory_bytes or fixed_bytes + kv_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        tokens_in_flight=engine.tokens_in_flight_max or max(1, in_flight),
        sequences=given_sequences or sequences,
        step_tokens=given_tokens or step_tokens,
        context_tokens=context,
        model_context_tokens=model.context_tokens,
        prefill_tokens_per_s=rates.prefill_tokens_per_s if rates else 0.0,
        decode_tokens_per_s=rates.decode_tokens_per_s if rates else 0.0,
    )


def with_sizes(engine: EngineSettings, sizes: ReplicaSizes) -> EngineSettings:
    """Return a deployment's engine settings with the sizes that it leaves open."""
    names = capabilities_of(engine.driver)
    derived = {
        names.sequences_option: str(sizes.sequences),
        names.step_tokens_option: str(sizes.step_tokens),
        names.waiting_option: str(WAITING_PER_SEQUENCE * sizes.sequences),
    }
    derived.pop("", None)
    return msgspec.structs.replace(
        engine,
        kv_memory_bytes=engine.kv_memory_bytes or sizes.kv_bytes,
        tokens_in_flight_max=engine.tokens_in_flight_max or sizes.tokens_in_flight,
        options={**derived, **engine.options},
    )


def prompt_step_s(engine: EngineSettings, prefill_tokens_per_s: float) -> float:
    """Return how long answers wait at most for a step that reads prompts, by the deployment's own
    options; inf if they do not bound it."""
    step_tokens_option = capabilities_of(engine.driver).step_tokens_option
    interval_ms = read_size(engine.options.get(INTERVAL_OPTION, ""))
    tokens = read_size(engine.options.get(step_tokens_option, ""))
    limits_s = [interval_ms / 1000] if interval_ms else []
    if tokens and prefill_tokens_per_s > 0:
        limits_s.append(tokens / prefill_tokens_per_s)
    return min(limits_s, default=inf)


def in_words(sizes: ReplicaSizes, overcommit: float = 1.0) -> str:
    """Return the sizes in one line, for `deploy` and `explain`.

    With `overcommit` they are those of a replica that is awake.
    """
    kv = f"KV {sizes.kv_bytes / GIB:.1f} GiB on each device"
    if sizes.kv_tokens:
        kv += f" ({sizes.kv_tokens:,} tokens)"
    line = (
        f"on {sizes.device_class}: {sizes.memory_bytes / GIB:.1f} GiB of each device, {kv}, "
        f"{sizes.tokens_in_flight:,} tokens in flight, {sizes.sequences} sequences, "
        f"{sizes.step_tokens:,} tokens a step, {sizes.context_tokens:,} tokens of context"
    )
    if sizes.context_tokens < sizes.model_context_tokens:
        line += f" (the model has {sizes.model_context_tokens:,}: --context-tokens)"
    if 0 < sizes.kv_tokens < sizes.context_tokens:
        line += "; the KV cache is too small for one such context: raise --kv-bytes or lower"
        line += " --context-tokens"
    if overcommit > 1:
        planned = sizes.memory_bytes / overcommit
        line += f"; idle replicas sleep: {planned / GIB:.1f} GiB are planned (--overcommit"
        line += f" {overcommit:g})"
    if not sizes.decode_tokens_per_s:
        return f"{line}; rates are measured when it runs"
    return (
        f"{line}; estimated {sizes.prefill_tokens_per_s:,.0f} tokens/s of prefill and "
        f"{sizes.decode_tokens_per_s:,.0f} of decode"
    )


def _capacity_within(
    model: CatalogModel, engine: EngineSettings, device_class: str, memory_bytes: int
) -> ReplicaCapacity | CannotFit | None:
    kind = class_of(device_class)
    if kind is None:
        return None
    limited = msgspec.structs.replace(kind, memory_bytes=min(kind.memory_bytes, memory_bytes))
    return replica_capacity(model, engine, limited)


def _largest_batch(
    model: CatalogModel,
    engine: EngineSettings,
    device_class: str,
    capacity: ReplicaCapacity | CannotFit | None,
    *,
    context_tokens: int,
    kv_tokens: float = float("inf"),
) -> int:
    """Return the largest batch of all copies within the ITL target and `kv_tokens` of KV cache."""
    kind = class_of(device_class)
    if device_class == CPU:
        return copies_of(engine) * SEQUENCES_UNKNOWN
    if kind is None or not isinstance(capacity, ReplicaCapacity):
        most = copies_of(engine) * GPU_SEQUENCES_UNKNOWN
        return int(max(copies_of(engine), min(most, kv_tokens / context_tokens)))
    copies = whole_copies(model, engine)
    kv_of_token = stored_kv_bytes_per_token(model, engine, device_class)
    step = StepTime(model, kind, capacity.split, engine.nodes, kv_of_token, context_tokens)
    of_copy = capacity.split.pipeline * step.largest_batch(kv_tokens / copies)
    return copies * min(BATCH_MAX, of_copy)


def _step_tokens(rates: ReplicaCapacity | None, device_class: str, copies: int) -> int:
    """Return the largest power of two that a copy's devices prefill in STEP_TARGET_S."""
    if rates is None:
        return STEP_TOKENS_UNKNOWN if device_class == CPU else GPU_STEP_TOKENS_UNKNOWN
    tokens = int(rates.prefill_tokens_per_s / copies * STEP_TARGET_S)
    if tokens < STEP_TOKENS_MIN:
        return STEP_TOKENS_MIN
    return min(STEP_TOKENS_MAX, 1 << (tokens.bit_length() - 1))
