"""The most memory that engines took: kept by version, model and settings, over restarts."""

from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.host import memory_peaks
from nodeagent.host.memory_peaks import MemoryPeaks
from tests.builders import a_spec, an_artifact

SPEC = a_spec("r1")


def peaks(folder: Path, version: str = "0.32") -> MemoryPeaks:
    return MemoryPeaks(folder, lambda driver: f"{driver} {version}")


def test_the_most_is_kept_over_a_restart(tmp_path: Path) -> None:
    before = peaks(tmp_path)
    assert before.peak_bytes(SPEC) == 0
    for used_bytes in (500, 900, 100):
        before.note(SPEC, used_bytes)
    assert before.peak_bytes(SPEC) == peaks(tmp_path).peak_bytes(SPEC) == 900


@pytest.mark.parametrize(
    "other",
    [
        {"artifact": an_artifact(b"others")},
        {"context_tokens": 9},
        {"engine": EngineSettings(driver="mock", kv_memory_bytes=1)},
        {"engine": EngineSettings(driver="mock", options={"sequences": "9"})},
        {"engine": EngineSettings(driver="vllm")},
    ],
    ids=["model", "context", "KV", "options", "engine"],
)
def test_another_model_or_other_settings_have_a_peak_of_their_own(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    kept = peaks(tmp_path)
    kept.note(SPEC, 900)
    assert kept.peak_bytes(a_spec("r1", **other)) == 0
    assert kept.peak_bytes(a_spec("another replica")) == 900


def test_another_version_of_the_engine_has_a_peak_of_its_own(tmp_path: Path) -> None:
    peaks(tmp_path).note(SPEC, 900)
    assert peaks(tmp_path, "0.33").peak_bytes(SPEC) == 0


def test_what_changes_no_plan_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(memory_peaks, "write_snapshot", lambda path, data: written.append(data))
    kept = peaks(tmp_path)
    for used_bytes in (1000, 1005, 990, 1005, 1200):
        kept.note(SPEC, used_bytes)
    assert len(written) == 2
    assert kept.peak_bytes(SPEC) == 1200


def test_a_damaged_file_and_a_full_disk_stop_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory_peaks").write_bytes(b"?")
    kept = peaks(tmp_path)
    assert kept.peak_bytes(SPEC) == 0

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_peaks, "write_snapshot", full)
    kept.note(SPEC, 900)
    assert kept.peak_bytes(SPEC) == 900
    (tmp_path / "memory_peaks").unlink()
    (tmp_path / "memory_peaks").mkdir()
    assert peaks(tmp_path).peak_bytes(SPEC) == 0


def test_the_number_of_peaks_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_peaks, "PEAKS_MAX", 2)
    kept = peaks(tmp_path)
    specs = [a_spec("r1", context_tokens=tokens) for tokens in (1, 2, 3)]
    for spec in specs[:2]:
        kept.note(spec, 900)
    kept.note(specs[0], 900)
    kept.note(specs[2], 900)
    assert [kept.peak_bytes(spec) for spec in specs] == [900, 0, 900]
