"""Compares the planner's estimated rates with published throughput.

    python -m ops.bench.planner_rates [--rows]

Each published figure is of a stated input and output length, at full load or with a stated number
of concurrent requests. The planner's step times (`scheduler/decide/capacity/step_time.py`) give the
throughput of the same setting: a request takes its share of the device for its prefill, and a place
in a batch for its output. At full load, all of a stated number of equal requests are there at once
and the server takes as many as its KV cache can hold to their ends. So they are answered in groups,
and the last group is smaller.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.models.model import CatalogModel, EngineSettings, ModelDimensions
from isochrone.wire.models.model_shape import kv_bytes_per_token
from scheduler.decide.capacity.device_classes import CLASSES
from scheduler.decide.capacity.replica_capacity import ReplicaCapacity, replica_capacity
from scheduler.decide.capacity.step_time import StepTime
from tests.builders import a_model

SERVER_BATCH_MAX: Final = 2048
"""The batch limit of the published runs at full load."""

GOAL: Final = 1.25
"""An estimate is within the goal if it is off by at most this factor."""

TRTLLM: Final = "TensorRT-LLM 0.14, docs/source/performance/perf-overview.md"
NEWER_TRTLLM: Final = "TensorRT-LLM 1.0, docs/source/performance/perf-overview.md"
A100_40: Final = "vLLM 0.23, johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
RTX4090: Final = "vLLM, mushfiqrahman.dev (Mistral 7B on an RTX 4090)"

_DENSE: Final = {"kv_heads": 8, "head_size": 128}
LLAMA_8B: Final = ModelDimensions(
    layers=32, hidden_size=4096, heads=32, parameters=8_030_000_000, **_DENSE
)
MISTRAL_7B: Final = msgspec.structs.replace(LLAMA_8B, parameters=7_250_000_000)
LLAMA_70B: Final = ModelDimensions(
    layers=80, hidden_size=8192, heads=64, parameters=70_600_000_000, **_DENSE
)
MIXTRAL: Final = msgspec.structs.replace(
    LLAMA_8B,
    parameters=46_700_000_000,
    expert_parameters=45_100_000_000,
    experts=8,
    experts_active=2,
)
LLAMA_405B: Final = ModelDimensions(
    layers=126, hidden_size=16_384, heads=128, parameters=405_900_000_000, **_DENSE
)
LENGTHS: Final = (
    (1000, 1000), (128, 128), (128, 2048), (2048, 128), (2048, 2048), (500, 2000), (5000, 500)
)  # fmt: skip
OTHER_LENGTHS: Final = ((128, 4096), (1000, 2000), (20_000, 2000))
"""Nothing was fitted to figures with these."""
REQUESTS: Final = dict(
    zip(
        LENGTHS + OTHER_LENGTHS,
        (3000, 30_000, 3000, 3000, 1500, 3000, 1500, 1500, 1500, 1000),
        strict=True,
    )
)
"""How many requests a published run at full load had, by their lengths."""


class PublishedRate(NamedTuple):
    """One published figure. `concurrency` 0 is full load."""

    model: str
    shape: ModelDimensions
    bits: int
    device_class: str
    devices: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    tokens_per_s: float
    source: str


_FULL_LOAD: Final = (
    ("Llama 3.1 8B", LLAMA_8B, 16, "h100-80g", 1, (7055, 15572, 9151, 1904, 4160, 7498, 1708)),
    ("Llama 3.1 8B", LLAMA_8B, 8, "h100-80g", 1, (14108, 26933, 18995, 3460, 8778, 14993, 3258)),
    ("Llama 3.1 8B", LLAMA_8B, 8, "h200-141g", 1, (16415, 27779, 22949, 3619, 11033, 19510, 3788)),
    ("Llama 3.1 8B", LLAMA_8B, 16, "a100-80g", 1, (3634, 6702, 4963, 795, 2265, 3945, 791)),
    ("Llama 3.1 8B", LLAMA_8B, 8, "l40s-48g", 1, (3727, 8640, 5102, 987, 2018, 4065, 856)),
    ("Llama 3 70B", LLAMA_70B, 16, "h100-80g", 4, (3730, 5838, 5072, 671, 2387, 3698, 831)),
    ("Llama 3 70B", LLAMA_70B, 8, "h100-80g", 2, (4092, 5192, 5852, 691, 2445, 4602, 897)),
    ("Llama 3 70B", LLAMA_70B, 16, "a100-80g", 4, (1766, 2421, 2484, 279, 1230, 2113, 362)),
    ("Llama 3 70B", LLAMA_70B, 16, "h100-80g", 8, (5963, 10598, 7554, 1289, 3991, 6321, 1446)),
    ("Mixtral 8x7B", MIXTRAL, 16, "h100-80g", 4, (15509, 27719, 21293, 3355, 9143, 17087, 3544)),
    ("Mixtral 8x7B", MIXTRAL, 16, "a100-80g", 4, (7357, 11329, 10929, 1352, 4964, 8930, 1604)),
)
"""Published rates at full load, one for each of LENGTHS."""

_NEWER: Final = (
    ("Llama 3.1 8B", LLAMA_8B, 8, "h100-80g", 1,
     (15220, 28312, 22714, 3450, 9305, 17660, 3459, 14325, 13899, 1351)),
    ("Llama 3.1 8B", LLAMA_8B, 8, "h200-141g", 1,
     (17744, 27911, 26221, 3538, 12194, 20770, 3902, 18027, 16828, 1804)),
    ("Llama 3.3 70B", LLAMA_70B, 8, "h200-141g", 1,
     (2909, 3803, 4336, 442, 2003, 3666, 566, 2872, 2994, 283)),
    ("Llama 3.3 70B", LLAMA_70B, 8, "h100-80g", 2,
     (4205, 6378, 6651, 762, 3082, 5222, 898, 4199, 4146, 437)),
    ("Llama 3.1 405B", LLAMA_405B, 8, "h200-141g", 8,
     (3330, 3814, 5348, 456, 2948, 4724, 650, 4741, 3722, 505)),
    ("Llama 3.1 405B", LLAMA_405B, 8, "h100-80g", 8,
     (2919, 3627, 4340, 453, 2296, 3994, 610, 3116, 2895, 345)),
)  # fmt: skip
"""The same of a newer version, one for each of LENGTHS and OTHER_LENGTHS."""

PUBLISHED: Final = (
    *(
        PublishedRate(model, shape, bits, device, devices, inputs, outputs, 0, rate, source)
        for source, lengths, groups in (
            (TRTLLM, LENGTHS, _FULL_LOAD),
            (NEWER_TRTLLM, LENGTHS + OTHER_LENGTHS, _NEWER),
        )
        for model, shape, bits, device, devices, rates in groups
        for (inputs, outputs), rate in zip(lengths, rates, strict=True)
    ),
    PublishedRate("Llama 3.1 8B", LLAMA_8B, 16, "a100-40g", 1, 1024, 128, 1, 75, A100_40),
    *(
        PublishedRate("Mistral 7B", MISTRAL_7B, 16, "4090-24g", 1, 256, 128, load, rate, RTX4090)
        for load, rate in ((4, 210), (8, 377), (16, 644), (32, 975), (48, 1190))
    ),
)


def estimated_tokens_per_s(row: PublishedRate) -> float:
    """Return the planner's estimate of output tokens/s in a published setting."""
    shape = msgspec.structs.replace(row.shape, weight_bits=row.bits, kv_bits=row.bits)
    model: CatalogModel = msgspec.structs.replace(
        a_model("m"), shape=shape, weights_bytes=int(shape.parameters * row.bits / 8)
    )
    kind = CLASSES[row.device_class]
    engine = EngineSettings(driver="tensorrt_llm", devices=row.devices)
    capacity = replica_capacity(model, engine, kind)
    assert isinstance(capacity, ReplicaCapacity), capacity
    # The published runs split by tensors alone.
    split = msgspec.structs.replace(capacity.split, tensor=row.devices, pipeline=1, expert=1)
    kv_of_token = kv_bytes_per_token(shape)
    step = StepTime(model, kind, split, 1, kv_of_token, row.input_tokens + row.output_tokens / 2)
    if row.concurrency:
        batches, requests = [row.concurrency], row.concurrency
    else:
        kv_tokens = row.devices * capacity.kv_bytes / kv_of_token
        held = kv_tokens / (row.input_tokens + row.output_tokens)
        requests = REQUESTS[row.input_tokens, row.output_tokens]
        batches = groups_of(requests, int(min(SERVER_BATCH_MAX, held)))
    prefill_s = requests * row.input_tokens / step.prefill_tokens_per_s()
    decode_s = row.output_tokens * sum(map(step.itl_s, batches))
    return requests * row.output_tokens / (prefill_s + decode_s)


def groups_of(requests: int, size: int) -> list[int]:
    """Return the sizes of the groups in which requests are answered."""
    whole, rest = divmod(requests, size)
    return [size] * whole + [rest] * (rest > 0)


def is_held_out(row: PublishedRate) -> bool:
    """Return whether nothing was fitted to a figure."""
    return (row.input_tokens, row.output_tokens) in OTHER_LENGTHS


def print_rows() -> None:
    """Print each published figure beside its estimate."""
    print("| model | bits | devices | in / out | load | published tok/s | estimated | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for row in PUBLISHED:
        estimate = estimated_tokens_per_s(row)
        print(
            f"| {row.model} | {row.bits} | {row.devices} x {row.device_class}"
            f" | {row.input_tokens} / {row.output_tokens} | {row.concurrency or 'full'}"
            f" | {row.tokens_per_s:,.0f} | {estimate:,.0f} | {estimate / row.tokens_per_s:.2f} |"
        )


def print_summary(rows: Iterable[PublishedRate]) -> None:
    """Print how near the estimates are for each model and kind of devices."""
    print("| model | bits | devices | figures | within 25 % | lowest ratio | highest ratio |")
    print("|---|---|---|---|---|---|---|")
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        ratio = estimated_tokens_per_s(row) / row.tokens_per_s
        load = f", {row.concurrency} at once" if row.concurrency else ""
        name = f"{row.model} | {row.bits} | {row.devices} x {row.device_class}"
        setting = f"{row.input_tokens} / {row.output_tokens}{load}"
        groups[name].append((ratio, f"{ratio:.2f} ({setting})"))
    for name, cells in groups.items():
        within = sum(1 / GOAL <= ratio <= GOAL for ratio, _ in cells)
        lowest, highest = min(cells)[1], max(cells)[1]
        print(f"| {name} | {len(cells)} | {within} | {lowest} | {highest} |")
    ratios = [ratio for cells in groups.values() for ratio, _ in cells]
    within = sum(1 / GOAL <= ratio <= GOAL for ratio in ratios)
    print(f"\nwithin 25 %: {within} of {len(ratios)}; median ratio {median(ratios):.2f}\n")


def main() -> None:
    """Print summaries of the figures that were fitted and of the others, or every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print each published figure")
    if parser.parse_args().rows:
        print_rows()
    else:
        print_summary(row for row in PUBLISHED if not is_held_out(row))
        print_summary(row for row in PUBLISHED if is_held_out(row))
        print("sources:", "; ".join(sorted({row.source for row in PUBLISHED})))


if __name__ == "__main__":
    main()
