"""`make up`: a fleet in three cities serves a real model on this machine.

CORRIDOR: bring up -> deploy -> ask everywhere -> let demand move the model -> stay, or exit.
"""

import argparse
import asyncio
import signal
import sys
import time

from rich.console import Console

from isochrone.cli.chat import ChatFailed
from isochrone.cli.client import AdminError
from isochrone.wire.ids import PopId
from ops.fleet import layout, screen, tour
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES
from ops.fleet.processes import StartFailed


async def run(*, oneshot: bool, console: Console) -> int:
    """Run the demo; return 0 where everything was as it should be."""
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {line}", highlight=False)

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    fleet = LocalFleet(layout.STATE, say)
    show = asyncio.create_task(_show(fleet, console, say, oneshot=oneshot))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((show, stop), return_when=asyncio.FIRST_COMPLETED)
        if not show.done():
            say("stopping before the end")
            return 130
        show.result()
        if oneshot:
            return 0
        ended = await screen.watch(fleet, console, stopping)
        if ended:
            say(f"{ended} ended by itself:\n{fleet.processes.tail(ended)}")
        return 1 if ended else 0
    except (StartFailed, AdminError, ChatFailed, TimeoutError) as error:
        console.print(f"[red]{error or 'timed out'}[/]", highlight=False)
        return 1
    finally:
        for task in (show, stop):
            task.cancel()
        await asyncio.gather(show, stop, return_exceptions=True)
        await fleet.down()
        say("everything has stopped")


async def _show(fleet: LocalFleet, console: Console, say: tour.Say, *, oneshot: bool) -> None:
    """Go through what there is to see; raises StartFailed where it is not as it should be."""
    near, far = CITIES[0], CITIES[-1]
    await fleet.up()
    await fleet.deploy()
    await fleet.wait_routed()
    say("warm: one streamed chat through each city's router")
    expected = {city.pop: near.pop for city in CITIES}
    problem = await _ask(fleet, console, f"warm only in {near.pop}", expected)
    if problem:
        raise StartFailed(problem)
    await tour.grow_demand(fleet, far, say)
    expected = {near.pop: near.pop, far.pop: far.pop}
    problem = await _ask(fleet, console, f"after demand grew in {far.pop}", expected)
    if problem:
        problem += ": where this machine is busy, the near replica is slow and the far one sooner"
        if oneshot:
            raise StartFailed(problem)
        say(problem)
    console.print(screen.how_to_use(fleet), highlight=False, markup=False, soft_wrap=True)


async def _ask(
    fleet: LocalFleet, console: Console, title: str, expected: dict[PopId, PopId]
) -> str:
    """Show where each city is served from; return what is not as expected."""
    answers, problem = await tour.ask_until(fleet, expected)
    console.print(tour.table_of(title, answers))
    return problem


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.fleet", description=__doc__)
    parser.add_argument("--oneshot", action="store_true", help="chat once, then exit 0 or 1")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    raise SystemExit(asyncio.run(run(oneshot=arguments.oneshot, console=console)))


if __name__ == "__main__":
    main()
