"""The GPU benchmark runs completely with a tiny model on the CPU."""

import json
import subprocess
import sys
from pathlib import Path


def test_it_measures_and_prints_tables(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.bench.engine_gpu", str(tmp_path / "toy"), "--tiny"]
    command += ["--only", "ours", "--out", str(tmp_path / "raw.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "raw.json").read_text())
    assert not told["failed"]
    measures = {"prefill", "short1", "long1", "short2", "long2", "ttft"}
    assert set(told["seconds"]["ours"]) == measures
    assert {"read_s", "load_s", "first_token_s"} < set(told["cold"])
    assert told["machine"]["copy_bytes_per_s"] > 0
    assert "| ours |" in ran.stdout and "| weights GB |" in ran.stdout
