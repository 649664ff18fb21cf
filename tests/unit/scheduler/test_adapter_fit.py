"""Which adapters are taken, by their files alone."""

import json
from typing import Any

import pytest

from isochrone.wire.models import adapter_files
from isochrone.wire.models.adapter_files import (
    COLONS_MAX,
    TENSORS_MAX,
    BadAdapter,
    read_adapter_config,
    read_tensor_shapes,
)
from isochrone.wire.models.model import ModelDimensions
from scheduler.decide.adapter_fit import check_adapter
from tests.lora_files import DIMENSIONS, adapter_shapes, config_file, weights_file

MODEL = ModelDimensions(**DIMENSIONS)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def check(shapes: Any, **config: Any) -> None:
    weights = weights_file(shapes)
    found = read_tensor_shapes(weights, len(weights))
    check_adapter(read_adapter_config(config_file(**config)), found, MODEL)


def test_an_adapter_of_the_model_is_taken() -> None:
    check(adapter_shapes())


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (adapter_shapes(hidden=32), "for another model"),
        (adapter_shapes(layers=3), "has 2 layers; the adapter is for another model"),
        (adapter_shapes(rank=8), "expected .4, columns"),
        ({f"{Q}.lora_A.weight": [4, 16]}, "its lora_B is missing"),
        ({f"{Q}.weight": [16, 16]}, "expected names like"),
        ({f"{Q}.lora_A.weight": [4, 16], f"{Q}.lora_B.weight": [8, 4]}, "returns 16"),
        ({f"{Q}.lora_A.weight": [4, 16, 1], f"{Q}.lora_B.weight": [16, 4]}, "lora_A is"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shapes: Any, reason: str) -> None:
    with pytest.raises(BadAdapter, match=reason):
        check(shapes)


def test_an_unknown_module_needs_halves_that_fit_each_other() -> None:
    module = "model.layers.0.mlp.experts.gate"
    check({f"{module}.lora_A.weight": [4, 7], f"{module}.lora_B.weight": [9, 4]})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "expected 'LORA'"),
        ({"r": 0}, "Expected `int` >= 1"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, "bias, modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_configs_that_no_engine_can_use_are_refused(fields: Any, reason: str) -> None:
    with pytest.raises(BadAdapter, match=reason):
        read_adapter_config(config_file(**fields))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"peft_type": "LORA"}', b"\xff", b"[" * 9999])
def test_a_config_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(BadAdapter):
        read_adapter_config(body)


def _with_header(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (b"", "ends within its header"),
        (b"PK\x03\x04zipfile", "no adapter in the safetensors format"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "no adapter in the safetensors format"),
        ((90).to_bytes(8, "little") + b"{}", "ends within its header"),
        (_with_header({"a": TENSOR}, bytes(15)), "the file has"),
        (_with_header({"a": TENSOR}, bytes(17)), "the file has"),
        (_with_header({"a": {**TENSOR, "dtype": "I64"}}, bytes(16)), "its type is 'I64'"),
        (_with_header({"a": {**TENSOR, "shape": [2, 3]}}, bytes(16)), "do not fit its shape"),
        (_with_header({"a": {**TENSOR, "data_offsets": [4, 20]}}, bytes(20)), "do not fit"),
        (_with_header({"a": TENSOR, "b": TENSOR}, bytes(32)), "do not fit"),
        (_with_header({"a": {**TENSOR, "shape": [2**31, 2**31]}}), "do not fit"),
        (_with_header({"a": {**TENSOR, "shape": [-1, 2]}}), "cannot read the weights' header"),
        # Their product would take longer the more there are, by the square of their number.
        (_with_header({"a": {**TENSOR, "shape": [2**32] * 9}}), "cannot read the weights' header"),
    ],
)
def test_files_that_lie_about_their_tensors_are_refused(weights: bytes, reason: str) -> None:
    with pytest.raises(BadAdapter, match=reason):
        read_tensor_shapes(weights, len(weights))


@pytest.mark.parametrize(
    ("entry", "count"), [(TENSOR, COLONS_MAX // 4 + 1), (0, COLONS_MAX + 1), ({}, COLONS_MAX + 1)]
)
def test_a_header_of_too_many_entries_is_not_decoded(
    entry: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stall the event loop, which waits for Python's lock, whatever the entries are."""
    monkeypatch.setattr(adapter_files, "_HEADER", None)
    weights = _with_header({str(number): entry for number in range(count)})
    with pytest.raises(BadAdapter, match=f"more than {TENSORS_MAX} tensors"):
        read_tensor_shapes(weights, len(weights))


def test_an_adapter_of_all_experts_of_a_model_is_taken() -> None:
    """A Qwen3-30B-A3B has 48 layers of 128 experts."""
    shapes = {
        f"base_model.model.model.layers.{layer}.mlp.{part}_proj.lora_{half}.weight": [1, 1]
        for layer in range(48)
        for part in (
            *("q", "k", "v", "o"),
            *(f"experts.{n}.{part}" for n in range(128) for part in ("gate", "up", "down")),
        )
        for half in "AB"
    }
    weights = weights_file(shapes)
    assert len(read_tensor_shapes(weights, len(weights))) == 37_248
