"""kill -9 of each part of fetches of KV between replicas of a PoP, as two_leg_kills does.

    python -m ops.attack.fetch_kills [--one-node] [--instants 50] [--first 0] [--seed 1]

One or both of two other replicas have the KV of each prompt; the one that is killed is named first.
With `--one-node` all are on one node, and KV goes through memory that two engines map.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from ops.attack.kills import AttackFailed, run_attack
from ops.attack.two_leg_kills import KillPhase, attack, format_table
from ops.attack.two_leg_nodes import NumberedRequest, Pair

VICTIMS: Final = ("holder engine", "fetching engine", "holder agent", "fetching agent")
ONE_NODE: Final = "--one-node"


class Fetches:
    """Other replicas have the KV of the prompts."""

    phases: Sequence[KillPhase] = (KillPhase.ASKING, KillPhase.TRANSFER, KillPhase.STREAMING)
    share_kv = True
    phase_s = 0.004  # A fetch takes about as long.

    def peers(self, pair: Pair, others: Sequence[str]) -> dict[str, str]:
        """Return the header that names the holders."""
        return pair.may_have(others)

    async def prepare(
        self, pair: Pair, others: Sequence[str], requests: Sequence[NumberedRequest], tenant: str
    ) -> None:
        """Have these replicas compute the prompts."""
        # One after the other, as the reference was computed.
        for other in others:
            for request in requests:
                first = NumberedRequest(request.prompt, request.seed, 1)
                if not (await pair.ask(first, tenant, replica=other)).is_whole:
                    raise AttackFailed(f"{other} did not compute a prompt for {tenant}")


def main() -> int:
    """Run the attack; return the exit code."""
    on_one_node = ONE_NODE in sys.argv
    if on_one_node:
        sys.argv.remove(ONE_NODE)
    # A node has one agent.
    victims = [name for name in VICTIMS if not (on_one_node and name == "holder agent")]
    kill = partial(attack, use=Fetches(), echo=True, on_one_node=on_one_node)
    return run_attack("ops.attack.fetch_kills", victims, kill, format_table)


if __name__ == "__main__":
    sys.exit(main())
