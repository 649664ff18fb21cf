"""`deploy --wait` waits for the deployed version."""

from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import main, serving
from isochrone.cli.client import AdminUnavailable
from isochrone.cli.context import CliContext


class Api:
    """An admin API with a deployment whose new version is warm at the second poll."""

    def __init__(self) -> None:
        self.row = {"deployment_id": "d", "etag": 1, "engine": {}, "policy": {}, "unmet": []}
        self.row |= {"version": 2}
        self.polls = 0

    def ask(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**self.row, "replicas": {"warm": 1} if self.polls >= 2 else {"loading": 1}}

    def list(self, path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        if path == "/v1/deployments":
            return [self.row]
        self.polls += 1
        old = {"version": 1, "state": "warm", "ending": False, "leader_id": "", "state_reason": ""}
        new = {**old, "version": 2}
        return [old] if self.polls < 2 else [old, new]


def test_deploy_waits_for_the_deployed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WAIT_INTERVAL_S", 0.0)
    api: Any = Api()
    result = CliRunner().invoke(
        serving.deploy, ["d", "--model", "new", "--wait"], obj=CliContext(api, "json")
    )
    assert result.exit_code == 0, result.output
    assert api.polls == 2
    assert '"warm": 1' in result.output, "what is shown is as new as what was waited for"


def test_a_wait_outlasts_a_scheduler_that_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WAIT_INTERVAL_S", 0.0)
    api: Any = Api()
    read = api.list

    def fails_once(path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        if path == "/v1/placements" and api.polls == 1:
            api.polls += 1
            raise AdminUnavailable("cannot answer: the database is unreachable")
        return list(read(path, query))

    api.list = fails_once
    result = CliRunner().invoke(
        serving.deploy, ["d", "--model", "new", "--wait"], obj=CliContext(api, "json")
    )
    assert result.exit_code == 0, result.output
    assert api.polls == 3


def waits(monkeypatch: pytest.MonkeyPatch, placed: list[dict[str, Any]]) -> str:
    """Return the message of a `deploy --wait` for which no replica becomes warm."""
    monkeypatch.setattr(serving, "WAIT_INTERVAL_S", 0.0)
    api: Any = Api()
    api.row["policy"] = {"replicas_min": 0, "keep_warm": []}
    api.list = lambda path, *_: [api.row] if path == "/v1/deployments" else placed
    command = ["deploy", "d", "--model", "new", "--wait", "--timeout", "0"]
    monkeypatch.setattr(main, "AdminClient", lambda *_: api)
    result = CliRunner().invoke(main.main, command)
    assert result.exit_code == 1
    return str(result.stderr)


def test_a_wait_that_nothing_can_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the first one starts when there is demand" in waits(monkeypatch, [])


def test_a_wait_that_is_over_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"version": 1, "state": "warm", "ending": False, "leader_id": "", "state_reason": ""}
    assert "no replica of version 2 is warm after 0 s: 1 loading" in waits(monkeypatch, [old])


@pytest.mark.parametrize(
    "given", [("--overcommit", "0.5"), ("--priority", "101"), ("--awake-min", "-1")]
)
def test_a_number_out_of_range_is_refused_before_it_is_sent(given: tuple[str, str]) -> None:
    api: Any = Api()
    result = CliRunner().invoke(serving.deploy, ["d", *given], obj=CliContext(api, "json"))
    assert result.exit_code == 2
    assert f"{given[1]} is not in the range" in result.output


def test_an_end_is_announced_moved_and_withdrawn() -> None:
    api: Any = Api()
    sent: list[dict[str, Any]] = []

    def ask(method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if path.endswith("/explain"):
            return {"sizes_in_words": []}
        sent.append(body)
        api.row["deprecation"] = body["deprecation"]
        return dict(api.row)

    api.ask = ask

    def deploy(*options: str) -> Any:
        context = CliContext(api, "json")
        return CliRunner().invoke(serving.deploy, ["d", "--model", "m", *options], obj=context)

    assert deploy().exit_code == 0
    assert sent[-1]["deprecation"] is None
    assert deploy("--sunset", "2027-03-31", "--replacement", "new").exit_code == 0
    announced: Any = sent[-1]["deprecation"]
    assert (announced["sunset_at"], announced["replacement"]) == (1_806_451_200, "new")
    assert deploy("--min", "2").exit_code == 0 and sent[-1]["deprecation"] == announced
    assert deploy("--sunset", "open").exit_code == 0
    assert sent[-1]["deprecation"] == {**announced, "sunset_at": 0}
    assert deploy("--sunset", "").exit_code == 0 and sent[-1]["deprecation"] is None
    refused = deploy("--sunset", "tomorrow")
    assert refused.exit_code == 2 and "2027-03-31" in refused.output


EXPLAINED: dict[str, Any] = {
    "sizes_in_words": ["on h100-80g: 57.2 GiB of KV cache, 512 sequences"],
    "here": [
        {
            "replica_id": "d-1",
            "state": "failed",
            "state_reason": "failed 6 times: [rank0]: ValueError: no :x: in [/model]",
        },
        {"replica_id": "d-2", "state": "warm", "state_reason": "", "memory_bytes": 3_512_083_036},
    ],
    "elsewhere": [],
    "cities": [],
    "next_moves": [],
    "prefetches": [],
    "unmet": ["no node has the memory"],
    "frozen": "",
}


def test_deploy_and_explain_print_what_was_derived_and_what_engines_say() -> None:
    """An engine's log may have what looks like markup."""
    api: Any = Api()
    api.ask = lambda _, path, *a, **o: EXPLAINED if path.endswith("/explain") else api.row
    context = CliContext(api, "table")
    deployed = CliRunner().invoke(serving.deploy, ["d", "--model", "m"], obj=context)
    assert deployed.exit_code == 0, deployed.output
    assert EXPLAINED["sizes_in_words"][0] in deployed.stderr
    # What the plan before this change lacked says nothing about it.
    assert "unmet" not in deployed.stdout
    assert "`isochrone status` shows what cannot be placed" in deployed.stderr
    shown = CliRunner().invoke(serving.explain, ["d"], obj=context)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == EXPLAINED["sizes_in_words"][0]
    assert "d-1: failed 6 times: [rank0]: ValueError: no :x: in [/model]" in lines
    assert "no node has the memory" in lines
    assert any("d-2" in line and "3.3 GiB" in line for line in lines)
    assert not any(line.startswith("d-2:") for line in lines)
