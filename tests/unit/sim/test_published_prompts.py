"""The published single runs beside the simulated replica."""

import gzip
from pathlib import Path

import pytest

from ops.sim.published_prompts import ANSWER_TOKENS, MEASURED, BatchSize, measured, simulated
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.world import BIG


def test_one_prompt_takes_its_work_and_several_wait_for_each_other() -> None:
    kind = REPLICA_KINDS["flowing"]
    profile = BIG.large
    alone = simulated(BatchSize(2048, 1), kind)
    work = 2048 * (1 + 1024 / profile.attention_tokens)
    assert alone.ttft_ms == [pytest.approx(1000 * work / profile.prefill_tokens_per_s)]
    assert alone.itl_ms[0] == pytest.approx(
        1000 * (profile.step_s + profile.step_per_sequence_s), rel=0.02
    )
    four = simulated(BatchSize(2048, 4), kind)
    assert len(four.ttft_ms) == 4
    assert min(four.ttft_ms) == alone.ttft_ms[0]
    assert max(four.ttft_ms) > 4 * alone.ttft_ms[0]


def test_only_runs_of_the_compared_model_and_devices_are_read(tmp_path: Path) -> None:
    rows = [
        ("llama2-70b", "h100-80gb", "8", 512, 4, ANSWER_TOKENS, 130.0, 31.0),
        ("llama2-70b", "h100-80gb", "8", 512, 4, ANSWER_TOKENS, 132.0, 32.0),
        ("llama2-70b", "h100-80gb", "8", 512, 4, 256, 1.0, 1.0),
        ("llama2-70b", "h100-80gb", "4", 512, 4, ANSWER_TOKENS, 1.0, 1.0),
        ("llama2-70b", "a100-80gb", "8", 512, 4, ANSWER_TOKENS, 1.0, 1.0),
        ("bloom-176b", "h100-80gb", "8", 512, 4, ANSWER_TOKENS, 1.0, 1.0),
    ]
    header = (
        "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"
    )
    path = tmp_path / MEASURED
    path.parent.mkdir()
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = measured(tmp_path)
    assert list(found) == [BatchSize(512, 4)]
    assert found[BatchSize(512, 4)].ttft_ms == [130.0, 132.0]
    assert found[BatchSize(512, 4)].itl_ms == [31.0, 32.0]
