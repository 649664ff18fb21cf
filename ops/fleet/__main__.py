"""`make up`: a fleet of three cities serves a real model on this machine.

Main path: start the fleet, deploy a model, send a chat through each city, create demand that adds a
replica, then keep running until Ctrl-C or exit.
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
    """Run the demo; return its exit code, 0 if every step had the expected result."""
    start_s = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start_s:6.1f} s[/]  {line}", highlight=False)

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    fleet = LocalFleet(layout.STATE, say)
    demo = asyncio.create_task(_demonstrate(fleet, console, say, oneshot=oneshot))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((demo, stop), return_when=asyncio.FIRST_COMPLETED)
        if not demo.done():
            say("interrupted: stopping")
            return 130
        demo.result()
        if oneshot:
            return 0
        ended = await screen.watch(fleet, console, stopping)
        if ended:
            say(f"{ended} exited unexpectedly:\n{fleet.processes.tail(ended)}")
        return 1 if ended else 0
    except (StartFailed, AdminError, ChatFailed, TimeoutError) as error:
        console.print(f"[red]{str(error) or 'timed out'}[/]", highlight=False)
        return 1
    finally:
        for task in (demo, stop):
            task.cancel()
        await asyncio.gather(demo, stop, return_exceptions=True)
        await fleet.down()
        say("all processes have stopped")


async def _demonstrate(
    fleet: LocalFleet, console: Console, say: tour.Say, *, oneshot: bool
) -> None:
    """Start the fleet and run the demo's steps. Raises StartFailed if a result is unexpected."""
    near, far = CITIES[0], CITIES[-1]
    await fleet.up()
    await fleet.deploy()
    await fleet.wait_routed()
    say("the model is warm: sending one streamed chat through each city's router")
    expected = {city.pop: near.pop for city in CITIES}
    problem = await _chat_everywhere(fleet, console, f"one replica, in {near.pop}", expected)
    if problem:
        raise StartFailed(problem)
    await tour.grow_demand(fleet, far, say)
    expected = {near.pop: near.pop, far.pop: far.pop}
    problem = await _chat_everywhere(fleet, console, f"after demand grew in {far.pop}", expected)
    if problem:
        problem += "; on a busy machine the near replica may be slower than a far one"
        if oneshot:
            raise StartFailed(problem)
        say(problem)
    # With `oneshot` the fleet stops now.
    if not oneshot:
        console.print(screen.how_to_use(fleet), highlight=False, markup=False, soft_wrap=True)


async def _chat_everywhere(
    fleet: LocalFleet, console: Console, title: str, expected: dict[PopId, PopId]
) -> str:
    """Print which PoP serves each city; return what differs from `expected`, or ""."""
    answers, problem = await tour.chat_until(fleet, expected)
    console.print(tour.table_of(title, answers))
    return problem


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.fleet", description=__doc__)
    parser.add_argument("--oneshot", action="store_true", help="exit after the demo, with 0 or 1")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    raise SystemExit(asyncio.run(run(oneshot=arguments.oneshot, console=console)))


if __name__ == "__main__":
    main()
