"""The sizes of replicas that follow from device and model, and how new replicas share a device."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.gguf_shape import gguf_shape
from isochrone.wire.models.model import CatalogModel, EngineSettings
from isochrone.wire.models.model_shape import shape_of
from isochrone.wire.peers.report import NodeDevice
from ops.bench.planner_rates import GOAL, LLAMA_8B, PUBLISHED, estimated_tokens_per_s
from scheduler.decide.capacity.default_sizes import in_words, replica_sizes, with_sizes
from scheduler.decide.capacity.device_classes import CLASSES, GIB
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.whatif.explain import explain_placement
from tests.builders import a_cluster, a_deployment, a_model, a_node
from tests.unit.scheduler.test_capacity import LLAMA_8B as LLAMA_CONFIG
from tests.unit.wire.test_gguf_shape import LLAMA_8B as GGUF_LLAMA_8B

LLAMA: CatalogModel = msgspec.structs.replace(
    a_model("llama"), shape=shape_of(LLAMA_CONFIG), weights_bytes=int(16e9), context_tokens=131_072
)
SMALL_GGUF: CatalogModel = msgspec.structs.replace(
    a_model("smol"), kv_bytes_per_token=23_040, weights_bytes=98_362_432, context_tokens=8192
)
"""Its catalogue entry has no dimensions: an earlier release read none from GGUF files."""
VLLM = EngineSettings(driver="vllm")
H100 = int(CLASSES["h100-80g"].memory_bytes * 0.95)


def planned(*deployments: Any, model: CatalogModel = LLAMA, memory: int = H100) -> PlacementPlan:
    device = NodeDevice(device_id=DeviceId("gpu0"), device_class="h100-80g", memory_bytes=memory)
    node = a_node("n1", "ams", devices=(device,))
    return plan_deployments(
        a_cluster(models=(model,), nodes=(node,), deployments=deployments, placements=())
    )


def test_an_8b_model_takes_what_an_h100_has_left() -> None:
    plan = planned(a_deployment("a", "llama", engine=VLLM))
    (start,) = plan.starts
    engine = start.spec.engine
    assert start.spec.memory_bytes == pytest.approx(H100, abs=GIB)
    assert engine.kv_memory_bytes > 55 * GIB
    assert engine.tokens_in_flight_max > 400_000
    assert engine.options == {"max_num_seqs": "512", "max_num_batched_tokens": "8192"}


def test_what_a_deployment_sets_is_kept() -> None:
    options = {"max_num_seqs": "7"}
    engine = EngineSettings(
        driver="vllm", kv_memory_bytes=GIB, tokens_in_flight_max=5, options=options
    )
    (start,) = planned(a_deployment("a", "llama", engine=engine)).starts
    assert start.spec.engine.kv_memory_bytes == GIB
    assert start.spec.engine.tokens_in_flight_max == 5
    assert start.spec.engine.options["max_num_seqs"] == "7"
    assert " 7 sequences," in in_words(replica_sizes(LLAMA, engine, "h100-80g", H100))
    assert start.spec.memory_bytes < 18 * GIB


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"batch_tokens_max": "16"}, (15, 16)),
        ({"batch_tokens_max": "1"}, (1, 1)),
        ({"sequences_max": "300"}, (300, 512)),
        ({"sequences_max": "4"}, (4, 256)),
        ({"sequences_max": "8", "batch_tokens_max": "16"}, (8, 16)),
    ],
)
def test_a_size_that_is_left_open_fits_the_one_that_is_given(
    given: dict[str, str], expected: tuple[int, int]
) -> None:
    engine = EngineSettings(driver="embedded", kv_memory_bytes=GIB, options=given)
    sizes = replica_sizes(SMALL_GGUF, engine, "cpu", 4 * GIB)
    assert (sizes.sequences, sizes.step_tokens) == expected


def test_each_copy_of_data_parallelism_gets_the_sizes_of_a_replica_of_its_own() -> None:
    options = {"data_parallel_size": "2"}
    two = msgspec.structs.replace(VLLM, devices=2, options=options)
    sizes, alone = (replica_sizes(LLAMA, engine, "h100-80g", H100) for engine in (two, VLLM))
    assert (sizes.sequences, sizes.step_tokens) == (alone.sequences, alone.step_tokens)
    assert sizes.kv_bytes == alone.kv_bytes
    assert sizes.kv_tokens == 2 * alone.kv_tokens
    assert sizes.tokens_in_flight == 2 * alone.tokens_in_flight


def test_new_replicas_on_one_device_share_what_it_has_left() -> None:
    plan = planned(a_deployment("a", "llama", engine=VLLM), a_deployment("b", "llama", engine=VLLM))
    sizes = [start.spec.memory_bytes for start in plan.starts]
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], abs=GIB)
    assert H100 - GIB < sum(sizes) <= H100
    assert all(s.spec.engine.kv_memory_bytes > 15 * GIB for s in plan.starts)


def test_a_replica_beside_one_with_its_own_size_gets_the_rest() -> None:
    fixed = msgspec.structs.replace(VLLM, kv_memory_bytes=20 * GIB)
    plan = planned(
        a_deployment("a", "llama", engine=fixed), a_deployment("b", "llama", engine=VLLM)
    )
    assert sum(start.spec.memory_bytes for start in plan.starts) <= H100
    by_name = {str(start.spec.deployment_id): start.spec.engine for start in plan.starts}
    assert by_name["a"].kv_memory_bytes == 20 * GIB
    assert 20 * GIB < by_name["b"].kv_memory_bytes < 30 * GIB


def test_a_small_model_leaves_memory_for_others() -> None:
    shape = shape_of({**LLAMA_CONFIG, "num_hidden_layers": 4, "num_key_value_heads": 1})
    small = msgspec.structs.replace(LLAMA, shape=shape, weights_bytes=10**9)
    (start,) = planned(a_deployment("a", "llama", engine=VLLM), model=small).starts
    assert start.spec.memory_bytes < H100 / 4


def test_a_context_that_does_not_fit_is_refused() -> None:
    long = msgspec.structs.replace(VLLM, context_tokens_max=131_072)
    plan = planned(a_deployment("a", "llama", engine=long), memory=24 * GIB)
    assert not plan.starts
    assert plan.unmet


def test_a_cpu_without_rates_gets_sixteen_sequences() -> None:
    engine = EngineSettings(driver="embedded")
    sizes = replica_sizes(LLAMA, engine, "cpu", 64 * GIB)
    # 16 x 2,048 tokens in 32 bits.
    assert sizes.kv_bytes == 16 * 2048 * 32 * 2 * 8 * 128 * 4
    assert sizes.tokens_in_flight == 16 * 2048
    assert with_sizes(engine, sizes).options == {
        "sequences_max": "16",
        "batch_tokens_max": "256",
        "waiting_max": "64",
    }
    assert "rates are measured" in in_words(sizes)


def test_a_gpu_that_is_not_listed_is_not_sized_like_a_cpu() -> None:
    """It was given 16 sequences, and so a tenth of the KV that it has space for."""
    engine = msgspec.structs.replace(VLLM, context_tokens_max=4096)
    sizes = replica_sizes(LLAMA, engine, "a6000-52g", 45 * GIB)
    assert sizes.memory_bytes == 45 * GIB
    assert sizes.tokens_in_flight == sizes.kv_tokens > 200_000
    assert (sizes.sequences, sizes.step_tokens) == (256, 2048)
    small = replica_sizes(LLAMA, engine, "5060-17g", 18 * GIB)
    assert 1 <= small.sequences < 256
    assert small.sequences * 512 <= small.kv_tokens


@pytest.mark.parametrize(("tokens", "is_told"), [(4095, True), (4096, False)])
def test_a_kv_cache_smaller_than_a_context_is_told(tokens: int, is_told: bool) -> None:
    """Engines refuse to start with it, or requests longer than it: `deploy` named the context."""
    engine = msgspec.structs.replace(VLLM, kv_memory_bytes=tokens * 32 * 2 * 8 * 128 * 2)
    sizes = replica_sizes(LLAMA, engine, "h100-80g", H100)
    assert sizes.kv_tokens == tokens
    told = "too small for one such context: raise --kv-bytes or lower --context-tokens"
    assert (told in in_words(sizes)) == is_told


def test_an_engine_without_kv_gets_none() -> None:
    sizes = replica_sizes(LLAMA, EngineSettings(driver="mock"), "cpu", 64 * GIB)
    assert sizes.kv_bytes == 0
    assert sizes.tokens_in_flight == 32_768


def test_explain_states_the_sizes() -> None:
    device = NodeDevice(device_id=DeviceId("gpu0"), device_class="h100-80g", memory_bytes=H100)
    cluster = a_cluster(
        models=(LLAMA,),
        nodes=(a_node("n1", "ams", devices=(device,)),),
        deployments=(a_deployment("a", "llama", engine=VLLM),),
    )
    explained = explain_placement(cluster, cluster.deployments[0].deployment_id)
    assert explained is not None
    (line,) = explained.sizes_in_words
    assert line.startswith("on h100-80g: ")
    assert "tokens in flight, 512 sequences" in line
    assert "4,096 tokens of context (the model has 131,072: --context-tokens)" in line


def test_estimates_agree_with_published_rates() -> None:
    ratios = [estimated_tokens_per_s(row) / row.tokens_per_s for row in PUBLISHED]
    within = [1 / GOAL <= ratio <= GOAL for ratio in ratios]
    assert sum(within) >= 0.85 * len(within)
    rows = zip(within, PUBLISHED, strict=True)
    of_8b = [ok for ok, row in rows if row.shape == LLAMA_8B and not row.concurrency]
    assert all(of_8b)


def test_an_over_committed_replica_gets_four_contexts_and_says_what_is_planned() -> None:
    """Not what its device has left, although `explain` said so."""
    engine = EngineSettings(driver="embedded")
    cluster = a_cluster(
        models=(SMALL_GGUF,),
        nodes=(a_node("n1", "ams", 12.0),),
        deployments=(a_deployment("a", "smol", engine=engine, overcommit=4.0),),
    )
    explained = explain_placement(cluster, cluster.deployments[0].deployment_id)
    assert explained is not None
    (sizes,), (line,) = explained.sizes, explained.sizes_in_words
    assert sizes.kv_tokens == sizes.tokens_in_flight == 4 * sizes.context_tokens
    planned = sizes.memory_bytes / 4 / GIB
    assert f"idle replicas sleep: {planned:.1f} GiB are planned (--overcommit 4)" in line


@pytest.mark.parametrize(
    ("driver", "options", "bits"),
    [
        ("embedded", {}, 32.0),
        ("embedded", {"kv_dtype": "fp16"}, 16.0),
        ("embedded", {"kv_dtype": "fp8"}, 8.0),
        ("llama_cpp", {}, 16.0),
        ("llama_cpp", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 8.5),
    ],
)
def test_the_type_of_the_kv_cache_counts_for_a_model_without_dimensions(
    driver: str, options: dict[str, str], bits: float
) -> None:
    engine = EngineSettings(
        driver=driver, kv_memory_bytes=GIB, tokens_in_flight_max=0, options=options
    )
    sizes = replica_sizes(SMALL_GGUF, engine, "cpu", 8 * GIB)
    assert sizes.kv_tokens == int(GIB / (SMALL_GGUF.kv_bytes_per_token * bits / 16))


def test_a_gguf_model_is_estimated_by_its_parameters() -> None:
    """By its 4.9 GB at 16 bits it would be a third as large, and prefill three times as fast."""
    gguf = msgspec.structs.replace(
        LLAMA, shape=gguf_shape(GGUF_LLAMA_8B), weights_bytes=4_900_000_000
    )
    engine = EngineSettings(driver="llama_cpp")
    packed, whole = (replica_sizes(model, engine, "h100-80g", H100) for model in (gguf, LLAMA))
    assert packed.prefill_tokens_per_s == pytest.approx(whole.prefill_tokens_per_s, rel=0.05)
