"""`isochrone plan` as an operator types it: saved here, planned there, the same each time."""

import json
import sys
from pathlib import Path

import pytest

from isochrone.cli.client import AdminError
from isochrone.cli.world_map import draw
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_cli import run_cli


async def test_a_saved_snapshot_answers_what_would_follow(admin: Admin, tmp_path: Path) -> None:
    await admin.pop("ams")
    await admin.pop("fra", "DE")
    file = str(tmp_path / "snapshot.json")
    code, _, err = await run_cli(admin, "plan", "--save", file)
    assert code == 0, err
    saved = json.loads(Path(file).read_text())
    assert [pop["pop"] for pop in saved["cluster"]["pops"]] == ["ams", "fra"]
    deployment = tmp_path / "new.json"
    sha = "a" * 64
    deployment.write_text(
        json.dumps(
            {
                "model": {
                    "model_id": "m", "architecture": "x", "context_tokens": 100,
                    "weights_bytes": 1000,
                    "artifact": {
                        "source": "file:/nowhere", "digest": sha,
                        "files": [{"path": "m", "size_bytes": 1, "sha256": sha}],
                    },
                },
                "deployment": {"deployment_id": "d", "name": "d", "model_id": "m"},
            }
        )
    )  # fmt: skip
    changes = (
        "--what-if", file, "--add-node", "fra=cpux2@8", "--add-deployment", str(deployment),
        "--price", "cpu=1.5",
    )  # fmt: skip
    code, out, err = await run_cli(admin, "-o", "json", "plan", *changes)
    assert code == 0, err
    answer = json.loads(out)
    assert [(move["kind"], move["pop"]) for move in answer["moves"]] == [("start", "fra")]
    assert answer["then"]["devices"][0]["cost_per_hour"] > 0
    code, out, _ = await run_cli(admin, "plan", *changes)
    assert "add 1 x 2 cpu in fra" in out
    assert f"plan {answer['digest']}" in out, "another process, the same plan"
    assert "devices:" in out
    some = (*changes, "--add-node", "ams=l4-24gx1@24")
    code, out, _ = await run_cli(admin, "plan", *some)
    (unpriced,) = [line.split() for line in out.splitlines() if line.startswith("l4-24g")]
    assert unpriced == ["l4-24g", "1", "-", "-"], "what has no price costs not nothing"
    code, _, err = await run_cli(admin, "plan", "--what-if", file, "--lose-pop", "xyz")
    assert code == 1
    assert "cannot change xyz" in err
    for wrong, words in (
        (("--demand", "ams=nan"), "cannot read the demand 'ams=nan': write ams=2"),
        (("--price", "cpu=-1"), "cannot read the prices cpu=-1"),
    ):
        code, _, err = await run_cli(admin, "plan", "--what-if", file, *wrong)
        assert (code, words in err) == (2, True), err
    half = tmp_path / "half.json"
    half.write_bytes(Path(file).read_bytes()[:100])
    code, _, err = await run_cli(admin, "plan", "--what-if", str(half))
    assert code == 1
    assert f"cannot read the snapshot {half}: " in err.replace("\n", "")


ANSWER = {
    "changes": ["lose ams"],
    "digest": "d",
    "moves": [
        {"kind": "start", "pop": "fra"},
        {"kind": "end", "pop": "ams"},
    ],
    "then": {
        "cities": [
            {"pop": "ams", "requests_per_s": 2.0, "ttft_p90_ms": 120.0},
            {"pop": "fra", "requests_per_s": 1.0, "ttft_p90_ms": None},
        ],
        "pops": [{"pop": "fra", "replicas": 1}],
    },
}  # fmt: skip
POPS = [
    {"pop": "ams", "longitude": 4.8, "latitude": 52.3},
    {"pop": "fra", "longitude": 8.6, "latitude": 50.0},
]


def test_without_matplotlib_a_map_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AdminError, match=r"cannot draw the map: .*pip install matplotlib"):
        draw(ANSWER, POPS, tmp_path / "map.png")


def test_a_map_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(ANSWER, POPS, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(AdminError, match="cannot write"):
        draw(ANSWER, POPS, tmp_path / "nowhere" / "map.png")


async def test_commands_of_the_release_before_read_the_snapshot(admin: Admin) -> None:
    await admin.pop("ams")
    answer = await admin.ask("GET", "/v1/picture")
    assert (answer.status, [pop["pop"] for pop in answer.body["cluster"]["pops"]]) == (200, ["ams"])
