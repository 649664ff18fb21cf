"""The demo prints commands for its fleet only while the fleet runs on."""

import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from isochrone.cli.chat import ChatFailed, ChatResult
from ops.fleet import __main__ as demo
from ops.fleet import bring_up, screen, tour
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES, City
from ops.fleet.processes import StartFailed


class StartedFleet:
    """A fleet whose every step has the expected result."""

    async def step(self, *_: object) -> str:
        return ""

    up = deploy = wait_routed = wait_warm = step


@pytest.mark.parametrize("oneshot", [True, False])
async def test_commands_for_a_fleet_that_stops_are_not_printed(
    oneshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, printed = StartedFleet(), io.StringIO()
    monkeypatch.setattr(demo, "_chat_everywhere", fleet.step)
    monkeypatch.setattr(tour, "grow_demand", fleet.step)
    monkeypatch.setattr(screen, "how_to_use", lambda _: "curl http://127.0.0.1")
    await demo._demonstrate(
        cast(Any, fleet), Console(file=printed), lambda _: None, oneshot=oneshot
    )
    assert ("curl" in printed.getvalue()) is not oneshot


async def test_a_refused_chat_is_demand_and_no_failure_of_the_demo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []

    async def refused(_: object, city: City, max_tokens: int) -> ChatResult:
        sent.append(city.pop)
        raise ChatFailed("3040: Capacity temporarily exceeded, please try again.")

    monkeypatch.setattr(tour, "chat_in", refused)
    await tour.grow_demand(cast(Any, StartedFleet()), CITIES[-1], lambda _: None)
    assert sent == [CITIES[-1].pop] * tour.DEMAND_CHATS


FAILING = {
    **{"pop": "ams", "replica_id": "r1", "node_id": "ams-1", "state": "failed"},
    **{"reason": "ams is kept warm", "state_reason": "failed 2 times: no memory"},
}


@pytest.mark.parametrize(
    ("placements", "why"),
    [
        ([FAILING], "r1 on ams-1: failed (failed 2 times: no memory)"),
        ([], "the disk has 0.02 GiB free, 1.09 GiB needed"),
    ],
)
async def test_a_fleet_that_does_not_become_warm_says_why(
    placements: list[dict[str, Any]], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def ask(_: str, path: str, **__: object) -> dict[str, Any]:
        unmet = ["the disk has 0.02 GiB free, 1.09 GiB needed"]
        return {"data": placements} if path == "/v1/placements" else {"unmet": unmet}

    printed: list[str] = []
    fleet = LocalFleet(tmp_path, printed.append)
    monkeypatch.setattr(fleet, "ask", ask)
    monkeypatch.setattr(bring_up, "WARM_TIMEOUT_S", 0.05)
    with pytest.raises(StartFailed, match="no replica in Amsterdam is warm") as failed:
        await fleet.wait_warm(CITIES[0])
    assert printed == [why] and str(failed.value).endswith(why)
