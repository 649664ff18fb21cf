"""An engine refuses a configuration that it cannot use, in words, before it serves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.conftest import ROOT

pytestmark = pytest.mark.model

UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"model_path": "/nowhere/model.gguf"}, "no such file"),
    ({"kv_memory_bytes": 2**60}, "not enough memory"),
    ({"kv_host_bytes": 2**60, "kv_memory_bytes": 2**20}, f"and {2**60 + 2**20} of KV"),
    ({"device": "cuda:0"}, "no CUDA device"),
    ({"device": "tpu"}, "device"),
    ({"batch_tokens_max": 2}, "must exceed"),
    ({"unknown_field": 1}, "unknown_field"),
]


@pytest.fixture(scope="module")
def refusals(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Return the exit codes and logs of engines with the unusable configurations."""
    folder = tmp_path_factory.mktemp("unusable")
    configs = [folder / str(number) for number in range(len(UNUSABLE))]
    whole = {"model_path": str(model_path), "served_name": "x", "socket": str(folder / "socket")}
    for config, (fields, _) in zip(configs, UNUSABLE, strict=True):
        config.write_text(json.dumps({**whole, **fields}))
    told = subprocess.run(
        [sys.executable, "-m", "tests.integration.engine.refused", *map(str, configs)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    logs = [config.with_suffix(".log").read_text() for config in configs]
    return list(zip(map(int, told.split()), logs, strict=True))


@pytest.mark.parametrize("number", range(len(UNUSABLE)), ids=lambda n: str(UNUSABLE[n][0]))
def test_an_unusable_config_ends_with_a_message(
    refusals: list[tuple[int, str]], number: int
) -> None:
    code, log = refusals[number]
    assert code == 2, log
    assert UNUSABLE[number][1] in log
    assert log.splitlines()[-1].startswith("cannot")
