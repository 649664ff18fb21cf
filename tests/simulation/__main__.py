"""`python -m tests.simulation`: run histories, and print those that find a problem."""

import argparse
import resource
import sys
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pool

from tests.simulation.history import run_history
from tests.simulation.patches import simulated

_STACK = ExitStack()


def _simulate() -> None:
    """Let this worker process simulate, until it ends."""
    _STACK.enter_context(simulated())


def main() -> int:
    """Run the seeds of the command line; return 1 if one finds a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=(), help="fault names with commas"
    )
    parser.add_argument(
        "--echo", action="store_true", help="print one seed with the services' logs"
    )
    arguments = parser.parse_args()
    if arguments.echo:
        with simulated():
            print(run_history(arguments.seed, only=arguments.only, echo=True))
        return 0
    began = time.monotonic()
    failed = 0
    simulated_s = 0.0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    with Pool(arguments.processes, _simulate) as pool:
        for history in pool.imap(partial(run_history, only=arguments.only), seeds, chunksize=4):
            simulated_s += history.simulated_s
            if history.problems:
                failed += 1
                print(history, flush=True)
        pool.close()
        pool.join()
    took_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (used.ru_utime + used.ru_stime) / arguments.count
    print(
        f"{arguments.count} histories, {failed} with a problem; {simulated_s / 3600:.1f} hours "
        f"simulated in {took_s:.0f} s: {3600 * arguments.count / took_s:.0f} histories an hour; "
        f"{cpu_s:.3f} s of CPU each: {3600 / cpu_s:.0f} an hour for each idle core"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
