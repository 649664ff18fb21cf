"""The processes of ranks 1 and up: forked from the front, told by it, ended with it.

Rule 1: they are forked before anything is loaded and any thread is started: what was imported is
theirs at once, and a standby's are there as soon as it knows what it becomes.
Rule 2: each hangs on a pair of sockets, by which it is let go, and watches the process that forked
it, so that it ends with that one wherever it hangs itself. Their death is known by `descriptors`.
Rule 3: every wait for one of them has a deadline; past it, or where it has ended, RankLost.
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

from nodeagent.engine.distributed.commands import Done, Join, Order, Refused, Word
from nodeagent.engine.model.shape import CheckpointError

log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("!Q")
_MESSAGE_BYTES_MAX: Final = 1 << 32
_END_S: Final = 2.0
_LEAVE_S: Final = 2.0
_orders: Final = msgspec.msgpack.Decoder(Order)
_words: Final = msgspec.msgpack.Decoder(Word)
_encoder: Final = msgspec.msgpack.Encoder()


class RankLost(Exception):
    """A rank has ended, or does not answer."""


class Channel:
    """One end of the pair of sockets between the front and another rank."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def limit(self, seconds: float) -> None:
        """Give every later wait this deadline."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Let go of this end."""
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Send one message."""
        self._socket.sendall(_HEAD.pack(len(message)) + message)

    def say(self, word: Word) -> None:
        """Answer the front."""
        self.send(_encoder.encode(word))

    def order(self) -> Order | None:
        """Return what the front wants; None where it has ended."""
        message = self.receive()
        return None if message is None else _orders.decode(message)

    def receive(self) -> bytearray | None:
        """Return one message; None where the other end is closed."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        (size,) = _HEAD.unpack(head)
        if size > _MESSAGE_BYTES_MAX:
            raise RankLost(f"cannot take a message of {size} bytes from another rank")
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
class Member:
    """One other rank, as the front sees it."""

    rank: int
    pid: int
    """0 where it is on another node."""
    descriptor: int
    """Readable once it has ended."""
    channel: Channel


class Crew:
    """All other ranks; none where the model is not split."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self.members = tuple(members)

    def add(self, members: Sequence[Member]) -> None:
        """Take in ranks of other nodes: their numbers are higher than those here."""
        self.members += tuple(members)

    def tell(self, order: Order) -> None:
        """Have each do the same."""
        message = _encoder.encode(order)
        for member in self.members:
            self._send(member, message)

    def tell_each(self, orders: Sequence[Order]) -> None:
        """Have each do its own."""
        for member, order in zip(self.members, orders, strict=True):
            self._send(member, _encoder.encode(order))

    def ask(self, order: Order) -> list[bytes]:
        """Have each do the same, and return what each answers."""
        self.tell(order)
        return [self._answer(member).contents for member in self.members]

    def wait_loaded(self) -> None:
        """Wait until all have loaded; raises CheckpointError where one cannot."""
        for member in self.members:
            try:
                self._answer(member)
            except RankLost as error:
                raise CheckpointError(str(error)) from error

    def join(self, timeout_s: float, heard: tuple[int, ...] = ()) -> None:
        """Have all meet; every later wait for one of them has this deadline."""
        for member in self.members:
            member.channel.limit(timeout_s)
        self.tell(Join(heard))

    def lost(self) -> str:
        """Say who has ended; nothing where all go on."""
        gone = [member for member in self.members if has_ended(member.descriptor)]
        return ", ".join(
            f"rank {one.rank} ({f'process {one.pid}' if one.pid else 'on another node'}) has ended"
            for one in gone
        )

    def end(self) -> None:
        """Let all end; who does not within _END_S is killed."""
        for member in self.members:
            member.channel.close()
        for member in self.members:
            if member.pid:
                if not has_ended(member.descriptor, _END_S):
                    log.warning("rank %d (process %d) did not end: killed", member.rank, member.pid)
                    self.kill(member)
                os.waitpid(member.pid, 0)
            os.close(member.descriptor)
        self.members = ()

    def kill(self, *members: Member) -> None:
        """End `members` at once, all where none are named; those elsewhere end with this one."""
        for member in members or self.members:
            if member.pid:
                signal.pidfd_send_signal(member.descriptor, signal.SIGKILL)

    def _send(self, member: Member, message: bytes) -> None:
        try:
            member.channel.send(message)
        except OSError as error:
            raise self._silent(member, error) from error

    def _answer(self, member: Member) -> Done:
        try:
            message = member.channel.receive()
        except OSError as error:
            raise self._silent(member, error) from error
        if message is None:
            raise RankLost(f"cannot go on without rank {member.rank}: it has ended")
        word: Done | Refused = _words.decode(message)
        if isinstance(word, Refused):
            raise CheckpointError(f"rank {member.rank}: {word.why}")
        return word

    def _silent(self, member: Member, error: OSError) -> RankLost:
        return RankLost(f"cannot go on without rank {member.rank}: {error}")


def muster(ranks: int, follow: Callable[[int, Channel], int]) -> Crew:
    """Fork all ranks but this process's own; each runs `follow` and never returns from here."""
    pairs = [tuple(map(Channel, socket.socketpair())) for _ in range(1, ranks)]
    members: list[Member] = []
    front = os.getpid()
    for rank, (here, there) in enumerate(pairs, 1):
        pid = os.fork()
        if pid == 0:
            for one, other in pairs:
                one.close()
                if other is not there:
                    other.close()
            _follow(rank, front, there, follow)
        members.append(Member(rank, pid, os.pidfd_open(pid), here))
    for _, there in pairs:
        there.close()
    return Crew(members)


def _follow(
    rank: int, front: int, channel: Channel, follow: Callable[[int, Channel], int]
) -> Never:
    # The agent signals the whole group; the front alone decides when the ranks end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def live() -> int:
        end_with(os.pidfd_open(front))
        return follow(rank, channel)

    become(rank, live)


def become(rank: int, live: Callable[[], int]) -> Never:
    """Have this process be a rank, and end as one."""
    code = 1
    try:
        code = live()
    # This process's own edge: whatever ends it is told, and ends the engine.
    except Exception:
        log.exception("rank %d ended", rank)
    finally:
        os._exit(code)


def end_with(descriptor: int) -> None:
    """Have this process end, wherever it hangs, soon after what is behind `descriptor` does."""

    def watch() -> None:
        has_ended(descriptor, None)
        # Time to end in order, where nothing hangs.
        time.sleep(_LEAVE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def has_ended(descriptor: int, seconds: float | None = 0.0) -> bool:
    """Say whether the process or line behind `descriptor` has ended, or does within a time."""
    return bool(select.select([descriptor], [], [], seconds)[0])
