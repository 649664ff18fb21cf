"""Whole runs over the small extract are deterministic and complete."""

from pathlib import Path

import pytest

from ops.sim import data, traces
from ops.sim.cases import CASES, case_world, speed_for_load
from ops.sim.data import EXTRACT, NoData
from ops.sim.measure import RunFigures, summarize
from ops.sim.planet_world import world_parser
from ops.sim.policy_choice import POLICY_NAMES
from ops.sim.run import simulate

MOONCAKE = CASES[0]
REQUESTS = traces.mooncake(EXTRACT / MOONCAKE.path, traces.TraceSlice(250))
WORLD = case_world(MOONCAKE, EXTRACT)
SPEED = speed_for_load(0.7, WORLD, REQUESTS, MOONCAKE.cached_share)


def figures(policy: str, age_s: float = 1.0) -> RunFigures:
    return summarize(policy, simulate(WORLD, REQUESTS, SPEED, age_s, policy))


def test_the_trace_is_read() -> None:
    assert len(REQUESTS) == 250
    assert [request.at_s for request in REQUESTS] == sorted(request.at_s for request in REQUESTS)
    first = REQUESTS[0]
    assert (first.prompt_tokens, first.output_tokens, len(first.blocks)) == (6758, 500, 13)
    sessions = {request.session for request in REQUESTS}
    assert 0.5 * len(REQUESTS) < len(sessions) < len(REQUESTS)


def test_round_trips_are_as_measured() -> None:
    number = {pop: n for n, pop in enumerate(WORLD.pops)}
    assert 60 < WORLD.rtt_ms[number["iad"]][number["sjc"]] < 75
    assert WORLD.rtt_ms[number["ams"]][number["fra"]] < 15
    assert WORLD.rtt_ms[number["lhr"]][number["syd"]] > 200
    assert all(WORLD.rtt_ms[n][n] < 1 for n in range(len(WORLD.pops)))


@pytest.mark.parametrize("policy", [*POLICY_NAMES, "oracle 0"])
def test_every_request_ends_once(policy: str) -> None:
    outcome = simulate(WORLD, REQUESTS, SPEED, 1.0, policy)
    assert sorted(served.number for served in outcome.served) == list(range(250))
    for served in outcome.served:
        assert served.ttft_s > 0
        assert 0 <= served.cached_tokens < served.prompt_tokens


def test_the_same_run_gives_the_same_outcome() -> None:
    assert simulate(WORLD, REQUESTS, SPEED, 1.0, "ours") == simulate(
        WORLD, REQUESTS, SPEED, 1.0, "ours"
    )


def test_our_policy_is_near_the_oracle_and_ahead_of_the_others() -> None:
    oracle, ours = figures("oracle 0.5"), figures("ours")
    assert ours.p90_ms < 1.25 * oracle.p90_ms
    for policy in ("random", "least requests", "least tokens, near", "cache aware"):
        assert ours.p90_ms < figures(policy).p90_ms


def test_missing_data_are_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOCHRONE_DATA", str(tmp_path))
    with pytest.raises(NoData, match="ISOCHRONE_DATA"):
        data.folder()
    assert data.folder(str(EXTRACT)) == EXTRACT


def test_missing_data_of_the_planet_are_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISOCHRONE_DATA", str(tmp_path))
    with pytest.raises(SystemExit):
        world_parser("").parse_args([])
    assert "name the folder of public data" in capsys.readouterr().err
