"""kill -9 of each part of two-leg requests whose engines are on one node, as two_leg_kills does.

    python -m ops.attack.window_kills [--instants 50] [--first 0] [--seed 1] [--victim NAME ...]

KV then goes through memory that two engines map. The node has one agent for all three replicas.
"""

import sys
from functools import partial
from typing import Final

from ops.attack.kills import run_attack
from ops.attack.two_leg_kills import attack, format_table

VICTIMS: Final = ("prefill engine", "decode engine", "decode agent")

if __name__ == "__main__":
    kill = partial(attack, echo=True, on_one_node=True)
    sys.exit(run_attack("ops.attack.window_kills", VICTIMS, kill, format_table))
