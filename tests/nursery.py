"""Programs forked from a process that has imported them: that takes a second of CPU or two.

`python -m tests.nursery DESCRIPTOR PROGRAM` reads orders from a Unix socket. Each has the arguments
and the environment of a process and three descriptors: its standard output, its standard error, and
a pipe on which its exit code is told. The nursery ends with the socket.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "nodeagent": ("nodeagent.__main__", "tests.system.equal_priority"),
    "nodeagent.engine": ("nodeagent.engine.__main__",),
    "router": ("router.__main__", "router.serve"),
    "scheduler": ("scheduler.__main__", "scheduler.app"),
}
"""The modules that are imported for each program. The first one has its `main`."""

KILLED: Final = 128 + signal.SIGKILL
"""What is told of a process whose exit code was not: the nursery has been killed."""


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, code: int) -> None:
        self.pid = pid
        self._code_pipe = os.fdopen(code)
        self._code: int | None = None
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._code_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired."""
        code = self._code_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _code_within(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._code_pipe], [], [], timeout)[0]:
            # Another thread may have waited, too.
            with self._reading:
                if self._code is None:
                    with self._code_pipe:
                        self._code = int(self._code_pipe.read() or KILLED)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Engine(Forked):
    """A forked engine, whose standard output is read."""

    def __init__(self, pid: int, code: int, stdout: int) -> None:
        super().__init__(pid, code)
        self.stdout = os.fdopen(stdout)


def fork_engine(config: Path, log: Path) -> Engine:
    """Start an engine: its arguments are `--config CONFIG`, its standard error is LOG."""
    read_stdout, stdout = os.pipe()
    with log.open("w") as stderr:
        arguments = ("--config", str(config))
        pid, code = _forked("nodeagent.engine", arguments, os.environ, (stdout, stderr.fileno()))
    os.close(stdout)
    return Engine(pid, code, read_stdout)


def fork_service(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
) -> Forked:
    """Start a program of PROGRAMS, with its output in a file."""
    return Forked(*_forked(program, arguments, environment, (log, log)))


def _forked(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
) -> tuple[int, int]:
    """Start a program; return its pid, and the pipe on which its exit code will be told."""
    order = json.dumps({"arguments": [program, *arguments], "environment": dict(environment)})
    read_code, code = os.pipe()
    nursery = _nursery(program)
    socket.send_fds(nursery, [order.encode()], [*outputs, code])
    os.close(code)
    return int(nursery.recv(32)), read_code


@functools.cache
def _nursery(program: str) -> socket.socket:
    """Return the connection to this process's nursery of a program, which ends with it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno()), program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def serve(orders: socket.socket, program: str) -> None:
    """Fork a process for each order, until there are no more; in it, return when it ends."""
    modules = [importlib.import_module(name) for name in PROGRAMS[program]]
    # A service begins with a collection (`run_service`). In each forked process it would walk all
    # imported objects, and copy their pages.
    gc.collect()
    gc.freeze()
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    codes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            tell(codes)
        if orders.fileno() not in ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(json.loads(order), descriptors, [orders.detach(), ended, wakes, *codes.values()])
            modules[0].main()
            return
        codes[pid] = descriptors[2]
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        orders.send(str(pid).encode())


def tell(codes: dict[int, int]) -> None:
    """Write the exit codes of the processes that have ended, each to its own pipe."""
    for pid in list(codes):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with suppress(BrokenPipeError), os.fdopen(codes.pop(pid), "w") as pipe:
                pipe.write(str(os.waitstatus_to_exitcode(status)))


def become(order: dict[str, Any], descriptors: list[int], others: list[int]) -> None:
    """Take over what was ordered, and close what belongs to the nursery."""
    stdout, stderr, code = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in (stdout, stderr, code, *others):
        os.close(descriptor)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["arguments"]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
