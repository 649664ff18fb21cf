"""The demo prints commands for its fleet only while the fleet runs on."""

import io
from typing import Any, cast

import pytest
from rich.console import Console

from ops.fleet import __main__ as demo
from ops.fleet import screen, tour


class StartedFleet:
    """A fleet whose every step has the expected result."""

    async def step(self, *_: object) -> str:
        return ""

    up = deploy = wait_routed = step


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
