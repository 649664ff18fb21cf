"""The estimated needs and capacity of replicas, with figures that can be checked by hand."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.models.model import CatalogModel, EngineSettings
from isochrone.wire.models.model_shape import (
    BadConfig,
    active_parameters,
    depth_cost_per_token,
    shape_of,
    sparse_share,
)
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.capacity.device_classes import CLASSES, GIB, DeviceClass, class_of
from scheduler.decide.capacity.replica_capacity import (
    CannotFit,
    ReplicaCapacity,
    devices_needed,
    kv_bytes_per_token,
    kv_minimum_bytes,
    replica_capacity,
    replica_rates,
    splits,
    weights_bytes_per_device,
)
from tests.builders import a_deployment, a_model

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "quantization_config": {"quant_method": "compressed-tensors", "bits": 4},
}
ALL_OF_IT = EngineSettings(driver="vllm", kv_memory_bytes=0)
EIGHTY_GB = msgspec.structs.replace(CLASSES["h100-80g"], memory_bytes=80 * 10**9)


def of(config: dict[str, Any], weights_bytes: float) -> CatalogModel:
    return msgspec.structs.replace(
        a_model("m"), shape=shape_of(config), weights_bytes=int(weights_bytes)
    )


def carried(model: CatalogModel, kind: str, devices: int = 1, **fields: Any) -> ReplicaCapacity:
    answer = replica_capacity(model, ALL_OF_IT, CLASSES[kind], devices=devices, **fields)
    assert isinstance(answer, ReplicaCapacity), answer
    return answer


@pytest.mark.parametrize("kind", [EIGHTY_GB, CLASSES["h100-80g"]], ids=["nominal", "as told"])
def test_560_gb_fit_eight_devices_of_80_gb_with_space_for_kv(kind: DeviceClass) -> None:
    dense = msgspec.structs.replace(a_model("dense"), weights_bytes=560 * 10**9)
    got = replica_capacity(dense, ALL_OF_IT, kind, devices=8)
    assert isinstance(got, ReplicaCapacity)
    assert 8 * got.kv_bytes > 30 * GIB
    experts = carried(of(KIMI, 560e9), "h100-80g", devices=8)
    assert 8 * experts.kv_bytes > 30 * GIB


def test_560_gb_do_not_fit_four_devices_and_the_refusal_shows_the_sum() -> None:
    refused = replica_capacity(of(KIMI, 560e9), ALL_OF_IT, EIGHTY_GB, devices=4)
    assert isinstance(refused, CannotFit)
    assert "521.54 GiB / 4 = 130.39 GiB" in refused.reason
    assert "on 4 x 74.51 GiB" in refused.reason
    assert "8 such devices would hold it" in refused.reason


def test_a_device_without_space_for_weights_suggests_no_device_count() -> None:
    engine = EngineSettings(driver="vllm", kv_memory_bytes=100 * GIB)
    refused = replica_capacity(of(LLAMA_8B, 16e9), engine, CLASSES["h100-80g"])
    assert isinstance(refused, CannotFit)
    assert "too much" in refused.reason
    assert "would hold it" not in refused.reason


def test_each_copy_of_data_parallelism_has_the_weights_and_a_cache_of_its_own() -> None:
    """The plan divided one copy of the weights over the devices of both."""
    model = of(LLAMA_8B, 16e9)
    copies = EngineSettings(driver="vllm", devices=2, options={"data_parallel_size": "2"})
    got = replica_capacity(model, copies, CLASSES["h100-80g"])
    assert isinstance(got, ReplicaCapacity)
    alone = carried(model, "h100-80g")
    assert got.weights_bytes == weights_bytes_per_device(model, copies) == int(16e9)
    assert got.kv_tokens == 2 * alone.kv_tokens
    assert got.decode_tokens_per_s == 2 * alone.decode_tokens_per_s
    one = msgspec.structs.replace(copies, devices=1, options={})
    assert kv_minimum_bytes(model, copies) == kv_minimum_bytes(model, one)


def test_copies_that_are_too_large_for_their_devices_are_refused() -> None:
    engine = EngineSettings(driver="vllm", devices=2, options={"data_parallel_size": "2"})
    refused = replica_capacity(of(LLAMA_8B, 140e9), engine, CLASSES["h100-80g"])
    assert isinstance(refused, CannotFit)
    assert "weights 130.39 GiB / 1 for each of 2 copies = 130.39 GiB" in refused.reason
    assert "4 such devices would hold it" in refused.reason
    three = msgspec.structs.replace(engine, devices=3)
    unequal = replica_capacity(of(LLAMA_8B, 16e9), three, CLASSES["h100-80g"])
    assert isinstance(unequal, CannotFit)
    assert "over 3 devices on 1 nodes for each of 2 copies" in unequal.reason


def test_copies_with_expert_parallelism_have_their_experts_in_common() -> None:
    model = of(KIMI, 560e9)
    options = {"data_parallel_size": "8", "enable_expert_parallel": "true"}
    engine = EngineSettings(driver="vllm", devices=8, options=options)
    dense = (1 - sparse_share(model)) * 560e9
    assert 0 < dense < 30e9
    assert weights_bytes_per_device(model, engine) == pytest.approx(
        dense + (560e9 - dense) / 8, rel=1e-6
    )
    assert isinstance(replica_capacity(model, engine, CLASSES["h200-141g"]), ReplicaCapacity)


@pytest.mark.parametrize(
    ("extra", "bytes_per_token"),
    [
        ({}, 32 * 2 * 8 * 128 * 2),  # grouped heads
        ({"num_key_value_heads": 32}, 32 * 2 * 32 * 128 * 2),  # a key and a value for each head
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2),  # one latent
        ({"sliding_window": 512}, 32 * 2 * 8 * 128 * 2 / 4),  # attends to a quarter of 2,048
        ({"sliding_window": 512, "use_sliding_window": False}, 32 * 2 * 8 * 128 * 2),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, (8 + 24 / 4) * 2 * 8 * 128 * 2),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16},
            (16 + 16 / 4) * 2 * 8 * 128 * 2,
        ),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 32 * 2 * 8 * 128),
        # Layers from `max_window_layers` on have the window.
        ({"sliding_window": 512, "max_window_layers": 24}, (24 + 8 / 4) * 2 * 8 * 128 * 2),
        # Family defaults: every sixth layer, every second one.
        ({"sliding_window": 512, "model_type": "gemma3_text"}, (5 + 27 / 4) * 2 * 8 * 256 * 2),
        ({"sliding_window": 512, "model_type": "gemma2"}, (16 + 16 / 4) * 2 * 8 * 256 * 2),
    ],
)
def test_kv_of_a_token_follows_from_the_config(
    extra: dict[str, Any], bytes_per_token: float
) -> None:
    assert kv_bytes_per_token(of({**LLAMA_8B, **extra}, 16e9), ALL_OF_IT) == bytes_per_token


def test_a_tokens_cost_grows_with_its_depth_as_attention_does() -> None:
    llama = of(LLAMA_8B, 16e9)
    assert 1 / depth_cost_per_token(llama) == pytest.approx(30_600, rel=0.01)
    assert llama.shape is not None
    half = msgspec.structs.replace(llama.shape, sliding_layers=16, sliding_window=512)
    windowed = msgspec.structs.replace(llama, shape=half)
    assert depth_cost_per_token(windowed) == depth_cost_per_token(llama) / 2
    kimi = of(KIMI, 5e11)
    assert active_parameters(kimi) == pytest.approx(32e9, rel=0.1)
    dense = msgspec.structs.replace(kimi.shape, experts=0, experts_active=0)  # type: ignore[type-var]
    ratio = depth_cost_per_token(kimi) / depth_cost_per_token(
        msgspec.structs.replace(kimi, shape=dense)
    )
    assert ratio == pytest.approx(1.03e12 / 32e9, rel=0.1), "experts at rest cost nothing"
    assert depth_cost_per_token(a_model("unknown")) == 0.0


def test_parameter_counts_match_the_published_ones() -> None:
    assert shape_of(LLAMA_8B).parameters == pytest.approx(8.03e9, rel=0.01)
    assert shape_of(KIMI).parameters == pytest.approx(1.03e12, rel=0.02)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_hidden_layers"),
        ({**LLAMA_8B, "num_key_value_heads": 7}, "32 heads over 7 KV heads"),
        ({**LLAMA_8B, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({**LLAMA_8B, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**LLAMA_8B, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({**LLAMA_8B, "head_dim": 0}, "head_dim is 0"),
        ({**LLAMA_8B, "hidden_size": 16}, "hidden_size 16 over 32 heads"),
    ],
)
def test_an_invalid_config_is_refused_with_a_reason(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        shape_of(config)


def test_quantised_weights_read_faster() -> None:
    whole = carried(of(LLAMA_8B, 16e9), "l4-24g")
    quantised = {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    small = carried(of(quantised, 5e9), "l4-24g")
    assert small.itl_s < whole.itl_s
    assert small.kv_tokens > whole.kv_tokens


@pytest.mark.parametrize(
    ("config", "has_eight_bit"),
    [
        ({}, False),
        ({"quant_method": "fp8"}, True),
        # Only weights are packed: the multiplication has 16 bits.
        ({"quant_method": "awq", "bits": 4}, False),
        ({"quant_method": "mxfp4"}, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            False,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            True,
        ),
    ],
)
def test_prefill_uses_the_arithmetic_rate_of_the_weight_bits(
    config: dict[str, Any], has_eight_bit: bool
) -> None:
    got = carried(of({**LLAMA_8B, "quantization_config": config}, 8e9), "h100-80g")
    kind = CLASSES["h100-80g"]
    at_16_bits = kind.flops * kind.flops_reached
    flops = kind.eight_bit_flops * kind.eight_bit_reached if has_eight_bit else at_16_bits
    reckoned = flops / (2 * of(LLAMA_8B, 8e9).shape.parameters)  # type: ignore[union-attr]
    assert got.prefill_tokens_per_s == pytest.approx(reckoned, rel=0.01)


@pytest.mark.parametrize(
    ("driver", "options", "bits"),
    [
        ("embedded", {"kv_dtype": "fp8"}, 8),
        ("embedded", {"kv_dtype": "fp32"}, 32),
        ("vllm", {"kv_cache_dtype": "fp8_e5m2"}, 8),
        ("vllm", {"kv_cache_dtype": "auto"}, 16),
        ("vllm", {"kv_dtype": "fp8"}, 16),
        ("llama_cpp", {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}, 6.5),
        ("llama_cpp", {"cache_type_k": "q8_0"}, 12.25),
    ],
)
def test_the_type_of_the_kv_cache_sizes_it(
    driver: str, options: dict[str, str], bits: float
) -> None:
    model, plain = of(LLAMA_8B, 16e9), EngineSettings(driver=driver)
    typed = msgspec.structs.replace(plain, options=options)
    ratio = kv_bytes_per_token(model, typed) / kv_bytes_per_token(model, plain)
    assert ratio == pytest.approx(bits / 16)


def test_family_defaults_fill_in_what_a_config_omits() -> None:
    nested = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "sliding_window": 1024,
    }
    shape = shape_of({"model_type": "gemma3", "text_config": nested})
    assert (shape.heads, shape.kv_heads, shape.head_size) == (8, 4, 256)
    assert shape.parameters == pytest.approx(3.88e9, rel=0.01)


def test_heads_that_do_not_divide_are_not_split() -> None:
    shape = shape_of({**LLAMA_8B, "num_attention_heads": 24, "num_key_value_heads": 4})
    assert {split.tensor for split in splits(shape, 6)} == {1, 2}
    assert {split.tensor for split in splits(shape, 8)} == {1, 2, 4, 8}


def test_latent_kv_is_copied_to_tensor_parts_but_split_over_expert_parts() -> None:
    model = of(KIMI, 560e9)
    found = {str(split) for split in splits(model.shape, 8)}
    assert {"TP8 x PP1", "TP8 x PP1, EP8", "TP4 x PP2", "TP1 x PP8"} <= found
    assert carried(model, "h200-141g", devices=8).split.expert == 8


def test_the_largest_model_is_spread_over_nodes_of_one_pop() -> None:
    model = of(KIMI, 1000e9)
    assert isinstance(replica_capacity(model, ALL_OF_IT, CLASSES["h100-80g"], devices=8), CannotFit)
    over = carried(model, "h100-80g", devices=16, nodes=2)
    assert over.split.tensor <= 8
    assert over.split.pipeline >= 2


def test_measured_rates_override_the_estimate() -> None:
    model = of(LLAMA_8B, 16e9)
    measured = ReplicaProfile(prefill_tokens_per_s=1234.0, decode_tokens_per_s=56.0)
    deployment = a_deployment(model=model.model_id)
    profiles = {(model.model_id, "h100-80g"): measured}
    assert replica_rates("h100-80g", deployment, model, profiles) == measured
    unmeasured = {(model.model_id, "h100-80g"): ReplicaProfile()}
    assert replica_rates("h100-80g", deployment, model, unmeasured).decode_tokens_per_s > 56.0


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 1e12, float("inf"), float("nan"), -1.0])
def test_an_implausible_measured_rate_is_ignored(rate: float) -> None:
    model = of(LLAMA_8B, 16e9)
    deployment = a_deployment(model=model.model_id)
    profiles = {
        (model.model_id, "h100-80g"): ReplicaProfile(
            prefill_tokens_per_s=rate, decode_tokens_per_s=50.0
        )
    }
    believed = replica_rates("h100-80g", deployment, model, profiles)
    assert believed == replica_rates("h100-80g", deployment, model, {})


def test_a_class_is_found_by_chip_whatever_size_the_driver_reports() -> None:
    assert class_of("h100-86g") == CLASSES["h100-80g"]
    assert class_of("a100-42g") == CLASSES["a100-40g"]
    assert class_of("abacus-1g") is None
    assert devices_needed(of(LLAMA_8B, 16e9), ALL_OF_IT, CLASSES["t4-16g"]) == 2


@settings(deadline=None, max_examples=60)
@given(
    weights_gb=st.integers(1, 1000),
    devices=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(sorted(CLASSES)),
)
def test_a_fit_stays_within_memory_and_a_misfit_shows_the_sum(
    weights_gb: int, devices: int, kind: str
) -> None:
    model = of(LLAMA_8B, weights_gb * 1e9)
    got = replica_capacity(model, ALL_OF_IT, CLASSES[kind], devices=devices)
    if isinstance(got, CannotFit):
        assert f"on {devices} x" in got.reason
        assert weights_gb * 1e9 / devices > CLASSES[kind].memory_bytes - 3 * GIB
    else:
        total = got.weights_bytes + got.overhead_bytes + got.kv_bytes
        assert total <= CLASSES[kind].memory_bytes
        assert got.weights_bytes * devices >= weights_gb * 1e9
        assert got.decode_tokens_per_s > 0
        assert got.prefill_tokens_per_s > 0
