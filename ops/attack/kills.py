"""The parts that attacks by kill -9 at drawn instants share: their command line, and the check that
an answer differs from its reference by rounding alone.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

Outcome = TypeVar("Outcome")

BORDER: Final = 0.0005
"""A sum of probabilities changes by at most this much if floats are rounded otherwise. A draw that
knows nothing of the right text is so near by chance once in a thousand times."""


class AttackFailed(Exception):
    """A token was lost, repeated or leaked, or a part did not come back."""


def end_in_order() -> None:
    """Have this program end as by Ctrl-C if it is terminated: else what it has started outlives it.

    Shells have their background jobs ignore Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def run_attack(
    program: str,
    victims: Sequence[str],
    attack: Callable[
        [Sequence[int], int, Sequence[str]], Coroutine[Any, Any, Mapping[str, list[Outcome]]]
    ],
    format_table: Callable[[Mapping[str, list[Outcome]]], Sequence[str]],
) -> int:
    """Read the arguments, run the attack and print its figures; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--instants", type=int, default=50, help="of each victim")
    parser.add_argument("--first", type=int, default=0, help="number of the first instant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victim", nargs="*", choices=victims, default=victims)
    arguments = parser.parse_args()
    instants = range(arguments.first, arguments.first + arguments.instants)

    async def attack_and_print() -> None:
        outcomes = await attack(instants, arguments.seed, tuple(arguments.victim))
        sys.stdout.write("\n".join(format_table(outcomes)) + "\n")

    return exit_code(attack_and_print())


def exit_code(attack: Coroutine[Any, Any, None]) -> int:
    """Run an attack; return the exit code of its program."""
    end_in_order()
    try:
        asyncio.run(attack)
    except AttackFailed as failure:
        sys.stdout.write(f"failed: {failure}\n")
        return 1
    return 0


async def is_given_beside_others(
    text: str, ask: Callable[[str], Awaitable[str]], name: str, counts: Iterable[int]
) -> bool:
    """Return whether an engine gives an answer that begins with `text` beside others like it.

    Sums of floats are rounded otherwise if other sequences run in the same steps: a draw at the
    border of two tokens may then give the other one. `ask` gets a tenant's name, so that no answer
    is read from a cache, and returns a text.
    """
    for count in counts:
        names = [f"beside {name} {count} {number}" for number in range(count)]
        together = await asyncio.gather(*map(ask, names))
        if any(answer.startswith(text) for answer in together):
            return True
    return False


def is_at_border(likeliest: Iterable[tuple[str, float]], token: str, point: float) -> bool:
    """Return whether a draw at `point` gives this token, or nearly.

    `likeliest` are the tokens and their probabilities, in the order in which they are drawn from.
    """
    before = 0.0
    for other, probability in likeliest:
        if other == token:
            return before - BORDER <= point <= before + probability + BORDER
        before += probability
    return False
