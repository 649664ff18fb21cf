"""What engines answer when they do not load an adapter, and whose fault it is."""

import pytest

from nodeagent.decide.adapter_refusal import CALL_FAILED, REASON_CHARS_MAX, refusal_reason


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, "the tensor is too wide", "the tensor is too wide"),
        (404, "", "the engine answered 404"),
        (500, f"{CALL_FAILED}LoRA rank 16 is greater than max_lora_rank 8.", "LoRA rank 16"),
        (500, f"{CALL_FAILED}While loading ft-1, expected target modules in", "While loading"),
        (500, f"{CALL_FAILED}CUDA out of memory. Tried to allocate 20 MiB", ""),
        (500, f"{CALL_FAILED}[Errno 28] No space left on device", ""),
        (500, "EngineCore encountered an issue", ""),
        (500, "", ""),
        (503, f"{CALL_FAILED}x", "x"),
        (502, "bad gateway", ""),
    ],
)
def test_a_refusal_is_told_from_a_failure(status: int, message: str, reason: str) -> None:
    found = refusal_reason(status, message)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_reason_has_a_limit() -> None:
    assert len(refusal_reason(400, "x" * 10_000)) == REASON_CHARS_MAX
    assert len(refusal_reason(500, CALL_FAILED + "x" * 10_000)) == REASON_CHARS_MAX
