"""Starts engines with configurations that they refuse: `python -m ...refused CONFIG...`

Each is a process of its own, forked from one that has imported everything, which takes three
seconds. Its log is CONFIG.log; the exit codes are printed, one a line.
"""

import os
import sys
from pathlib import Path

from nodeagent.engine.__main__ import main


def run_all(configs: list[str]) -> None:
    for config in configs:
        pid = os.fork()
        if pid == 0:
            with Path(f"{config}.log").open("w") as log:
                os.dup2(log.fileno(), sys.stderr.fileno())
            sys.argv = ["nodeagent.engine", "--config", config]
            main()
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    run_all(sys.argv[1:])
