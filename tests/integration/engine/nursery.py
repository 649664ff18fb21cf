"""Engine processes forked from one that has imported everything, which takes two seconds of CPU.

`python -m tests.integration.engine.nursery DESCRIPTOR` reads orders from a Unix socket. Each has
the arguments of an engine and three descriptors: its standard output, its standard error, and a
pipe on which its exit code is told. The process ends with the socket.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
KILLED: Final = 128 + signal.SIGKILL
"""What is told of an engine whose exit code was not: the nursery has been killed."""


class Engine:
    """A forked engine, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, stdout: int, code: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(stdout)
        self._code_pipe = os.fdopen(code)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._code_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired."""
        code = self._code_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("nodeagent.engine", timeout or 0.0)
        return code

    def _code_within(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._code_pipe], [], [], timeout)[0]:
            with self._code_pipe:
                self._code = int(self._code_pipe.read() or KILLED)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_engine(config: Path, log: Path) -> Engine:
    """Start an engine: its arguments are `--config CONFIG`, its standard error is LOG."""
    order = json.dumps({"arguments": ["--config", str(config)], "environment": dict(os.environ)})
    (read_stdout, stdout), (read_code, code) = os.pipe(), os.pipe()
    with log.open("w") as stderr:
        nursery = _nursery()
        socket.send_fds(nursery, [order.encode()], [stdout, stderr.fileno(), code])
    os.close(stdout)
    os.close(code)
    return Engine(int(nursery.recv(32)), read_stdout, read_code)


@functools.cache
def _nursery() -> socket.socket:
    """Return the connection to this process's nursery, which ends with it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[its.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def serve(orders: socket.socket) -> None:
    """Fork an engine for each order, until there are no more; in an engine, return when it ends."""
    from nodeagent.engine.__main__ import main

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
            main()
            return
        codes[pid] = descriptors[2]
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        orders.send(str(pid).encode())


def tell(codes: dict[int, int]) -> None:
    """Write the exit codes of the engines that have ended, each to its own pipe."""
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
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["nodeagent.engine", *order["arguments"]]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
