"""Values of engine options that `deploy` refuses, so that no engine has to."""

import pytest

from isochrone.wire.engines.engine_options import ENGINE_OPTIONS


@pytest.mark.parametrize(
    ("driver", "option", "value", "problem"),
    [
        ("vllm", "max_num_seqs", "abc", "whole number above 0, not 'abc'"),
        ("vllm", "max_num_seqs", "0", "whole number above 0"),
        ("vllm", "max_num_seqs", "٣", "whole number above 0"),
        ("vllm", "max_num_seqs", "16", ""),
        ("vllm", "max_num_batched_tokens", "8k", ""),
        ("sglang", "max_running_requests", "-1", "whole number above 0"),
        ("tensorrt_llm", "max_batch_size", "1.5", "whole number above 0"),
        ("llama_cpp", "parallel", "many", "whole number above 0"),
        ("embedded", "kv_store_bytes", "9" * 15, ""),
        ("embedded", "kv_store_bytes", "9" * 400, "whole number above 0"),
        ("embedded", "kv_store_bytes", "9" * 5000, "whole number above 0"),
        ("embedded", "sequences_max", "many", "'sequences_max': Expected `int`"),
        ("embedded", "sequences_max", "0", "Expected `int` >= 1"),
        ("embedded", "quantisation", "int3", "'int3' for option 'quantisation': use one of "),
        ("embedded", "kv_dtype", "int8", "use one of fp32, bf16, fp16, fp8"),
        ("embedded", "tensor_parallel", "65", "Expected `int` <= 64"),
        ("embedded", "sequences_max", "32", ""),
        ("embedded", "kv_dtype", "fp8", ""),
        ("embedded", "draft_path", "/models/draft", ""),
    ],
)
def test_a_value_that_an_engine_cannot_use_is_named(
    driver: str, option: str, value: str, problem: str
) -> None:
    found = ENGINE_OPTIONS[driver].problem({option: value})
    assert problem in found
    assert bool(found) == bool(problem)


def test_checked_options_exist() -> None:
    for options in ENGINE_OPTIONS.values():
        assert options.numbers <= options.values
