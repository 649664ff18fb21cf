"""The worker processes, ranks 1 and up: forked from rank 0, commanded by it, ended with it.

Rule 1: workers are forked before anything is loaded and any thread is started. They share the
imported modules, and those of a standby process exist before it knows its model.
Rule 2: each worker has a socket pair with rank 0; closing it ends the worker. A worker also watches
the process that forked it, so that it ends with that process even if it hangs. Rank 0 learns of a
worker's end from a pidfd or, on another node, from a connection.
Rule 3: every wait for a worker that has loaded its shard has a deadline; after it, or if the worker
has ended, WorkerLost is raised. How long loading may take is limited by the agent.
"""

import logging
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Never

import msgspec

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.workers.commands import (
    Command,
    CommandDone,
    JoinGroup,
    ShardRefused,
    WorkerReply,
)

log = logging.getLogger(__name__)

_MESSAGE_LENGTH: Final = struct.Struct("!Q")
_MESSAGE_BYTES_MAX: Final = 1 << 32
_SHUTDOWN_S: Final = 2.0
"""How long a worker may take to end before it is killed."""
LOST_S: Final = 2.0
"""How long rank 0 looks, once it cannot go on, whether a worker has ended."""
_ORDERLY_EXIT_S: Final = 2.0
"""How long a process may take to end by itself after the one it depends on has ended."""
_command_decoder: Final = msgspec.msgpack.Decoder(Command)
_reply_decoder: Final = msgspec.msgpack.Decoder(WorkerReply)
_encoder: Final = msgspec.msgpack.Encoder()


class WorkerLost(Exception):
    """A worker has ended, or does not answer."""


class CommandChannel:
    """One end of the socket pair between rank 0 and a worker."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline of every later wait."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Send one message."""
        self._socket.sendall(_MESSAGE_LENGTH.pack(len(message)) + message)

    def reply(self, reply: WorkerReply) -> None:
        """Send a worker's reply to rank 0."""
        self.send(_encoder.encode(reply))

    def receive_command(self) -> Command | None:
        """Return the next command of rank 0, or None if rank 0 has ended."""
        message = self.receive()
        return None if message is None else _command_decoder.decode(message)

    def receive(self) -> bytearray | None:
        """Return one message, or None if the other end is closed."""
        header = self._read(_MESSAGE_LENGTH.size)
        if header is None:
            return None
        (size,) = _MESSAGE_LENGTH.unpack(header)
        if size > _MESSAGE_BYTES_MAX:
            raise WorkerLost(f"cannot take a message of {size} bytes from another rank")
        return self._read(size)

    def _read(self, size: int) -> bytearray | None:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                return None
            view = view[count:]
        return content


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """One worker, as rank 0 sees it."""

    rank: int
    pid: int
    """0 if the worker is on another node."""
    descriptor: int
    """Becomes readable when the worker has ended."""
    channel: CommandChannel


class WorkerGroup:
    """All workers of rank 0; none if the model is not split."""

    def __init__(self, workers: Sequence[WorkerHandle] = ()) -> None:
        self.workers = tuple(workers)

    def add(self, workers: Sequence[WorkerHandle]) -> None:
        """Add workers of other nodes, whose ranks are higher than those here."""
        self.workers += tuple(workers)

    def broadcast(self, command: Command) -> None:
        """Send the same command to every worker."""
        message = _encoder.encode(command)
        for worker in self.workers:
            self._send(worker, message)

    def scatter(self, commands: Sequence[Command]) -> None:
        """Send each worker its own command."""
        for worker, command in zip(self.workers, commands, strict=True):
            self._send(worker, _encoder.encode(command))

    def gather(self, command: Command) -> list[bytes]:
        """Send the same command to every worker, and return the contents of their replies."""
        self.broadcast(command)
        return [self._receive_reply(worker).contents for worker in self.workers]

    def wait_loaded(self) -> None:
        """Wait until every worker has loaded; raises CheckpointError if one cannot."""
        for worker in self.workers:
            try:
                self._receive_reply(worker)
            except WorkerLost as error:
                raise CheckpointError(str(error)) from error

    def join(self, timeout_s: float, layer_inputs: tuple[int, ...] = ()) -> None:
        """Have the workers connect to each other and to rank 0.

        Every later wait for a worker has the deadline `timeout_s`. The workers send rank 0 the
        inputs of the layers `layer_inputs`.
        """
        for worker in self.workers:
            worker.channel.set_timeout(timeout_s)
        self.broadcast(JoinGroup(layer_inputs))

    def describe_lost(self, timeout_s: float = 0.0) -> str:
        """Return which workers have ended, or "" if none has.

        Waits at most `timeout_s` for the first one: the connections of a killed process break
        before the kernel says that it has ended.
        """
        if self.workers:
            select.select([worker.descriptor for worker in self.workers], [], [], timeout_s)
        lost = [worker for worker in self.workers if has_ended(worker.descriptor)]
        return ", ".join(
            f"rank {worker.rank}"
            f" ({f'process {worker.pid}' if worker.pid else 'on another node'}) has ended"
            for worker in lost
        )

    def shut_down(self) -> None:
        """Let all workers end; kill those that take longer than _SHUTDOWN_S."""
        for worker in self.workers:
            worker.channel.close()
        for worker in self.workers:
            if worker.pid:
                if not has_ended(worker.descriptor, _SHUTDOWN_S):
                    log.warning("rank %d (process %d) did not end: killed", worker.rank, worker.pid)
                    self.kill(worker)
                os.waitpid(worker.pid, 0)
            os.close(worker.descriptor)
        self.workers = ()

    def kill(self, *workers: WorkerHandle) -> None:
        """Kill `workers`, or all if none are given; those on other nodes end with this process."""
        for worker in workers or self.workers:
            if worker.pid:
                signal.pidfd_send_signal(worker.descriptor, signal.SIGKILL)

    def _send(self, worker: WorkerHandle, message: bytes) -> None:
        try:
            worker.channel.send(message)
        except OSError as error:
            raise WorkerLost(f"cannot go on without rank {worker.rank}: {error}") from error

    def _receive_reply(self, worker: WorkerHandle) -> CommandDone:
        try:
            message = worker.channel.receive()
        except OSError as error:
            raise WorkerLost(f"cannot go on without rank {worker.rank}: {error}") from error
        if message is None:
            raise WorkerLost(f"cannot go on without rank {worker.rank}: it has ended")
        reply: CommandDone | ShardRefused = _reply_decoder.decode(message)
        if isinstance(reply, ShardRefused):
            raise CheckpointError(f"rank {worker.rank}: {reply.reason}")
        return reply


def fork_workers(ranks: int, run_worker: Callable[[int, CommandChannel], int]) -> WorkerGroup:
    """Fork ranks 1 to `ranks` - 1. Each runs `run_worker` and never returns from here."""
    pairs = [tuple(map(CommandChannel, socket.socketpair())) for _ in range(1, ranks)]
    workers: list[WorkerHandle] = []
    rank0_pid = os.getpid()
    for rank, (rank0_end, worker_end) in enumerate(pairs, 1):
        pid = os.fork()
        if pid == 0:
            for other_rank0_end, other_worker_end in pairs:
                other_rank0_end.close()
                if other_worker_end is not worker_end:
                    other_worker_end.close()
            _run_forked(rank, rank0_pid, worker_end, run_worker)
        workers.append(WorkerHandle(rank, pid, os.pidfd_open(pid), rank0_end))
    for _, worker_end in pairs:
        worker_end.close()
    return WorkerGroup(workers)


def _run_forked(
    rank: int,
    rank0_pid: int,
    channel: CommandChannel,
    run_worker: Callable[[int, CommandChannel], int],
) -> Never:
    # The agent signals the whole process group, but rank 0 decides when the workers end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run() -> int:
        exit_after(os.pidfd_open(rank0_pid))
        return run_worker(rank, channel)

    run_as_rank(rank, run)


def run_as_rank(rank: int, run: Callable[[], int]) -> Never:
    """Run `run` in this process, and exit with the code that it returns."""
    code = 1
    try:
        code = run()
    # The process ends here: any error is logged, and the exit code ends the engine.
    except Exception:
        log.exception("rank %d ended", rank)
    finally:
        os._exit(code)


def exit_after(descriptor: int) -> None:
    """Exit this process, even if it hangs, soon after what is behind `descriptor` has ended."""

    def watch() -> None:
        has_ended(descriptor, None)
        # Time for an orderly exit, if nothing hangs.
        time.sleep(_ORDERLY_EXIT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def has_ended(descriptor: int, timeout_s: float | None = 0.0) -> bool:
    """Return whether the process or connection behind `descriptor` has ended.

    Waits at most `timeout_s` for that, without limit if it is None.
    """
    return bool(select.select([descriptor], [], [], timeout_s)[0])
