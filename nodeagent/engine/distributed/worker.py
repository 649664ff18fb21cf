"""What a rank other than the front does: load its share, then what it is told, until the end."""

import os
import signal
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Never

from isochrone.service.logs import setup_logs
from isochrone.wire.assignment import Group
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.adapter_shards import raw, take
from nodeagent.engine.distributed.collectives import Ranks
from nodeagent.engine.distributed.commands import (
    Adapt,
    Clear,
    Copy,
    Done,
    Forget,
    Join,
    Order,
    Read,
    Refused,
    Run,
    Write,
)
from nodeagent.engine.distributed.rank0 import shaped
from nodeagent.engine.distributed.rendezvous import dial, store_of
from nodeagent.engine.distributed.shards import Share
from nodeagent.engine.distributed.worker_group import Channel, become, end_with
from nodeagent.engine.kernels.cpu.huge_pages import give_back
from nodeagent.engine.loading import meet, need_memory, open_share, ranks_here, split_of
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.checkpoint import open_checkpoint


def follow_from_afar(config: EngineConfig, group: Group) -> Never:
    """Be this node's ranks of a group that another node leads, to its end."""

    def live(rank: int) -> int:
        setup_logs(f"engine-rank-{rank}")
        lines = dial(group, rank, config.join_s)
        end_with(lines.life.fileno())
        return follow(config, rank, Channel(lines.orders))

    def live_with(parent: int, rank: int) -> int:
        end_with(os.pidfd_open(parent))
        return live(rank)

    first, *others = ranks_here(config)
    forked, parent = [], os.getpid()
    for rank in others:
        pid = os.fork()
        if pid == 0:
            become(rank, partial(live_with, parent, rank))
        forked.append(pid)

    def failed(options: int) -> bool:
        ended = (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) for pid in forked)
        return any(one is not None and one.si_status != 0 for one in ended)

    def child_ended(number: int, frame: FrameType | None) -> None:
        # The front would wait for a rank that ends before it has dialled.
        if failed(os.WNOHANG):
            os._exit(1)

    signal.signal(signal.SIGCHLD, child_ended)
    child_ended(signal.SIGCHLD, None)
    # The front may see a rank's end, and end, before this process is told of it.
    become(first, lambda: live(first) or failed(0))


def follow(config: EngineConfig, rank: int, channel: Channel) -> int:
    """Follow the front to its end; return the process's exit code."""
    setup_logs(f"engine-rank-{rank}")
    if channel.order() is None:
        return 0
    ranks = Ranks(split_of(config), rank)
    try:
        source = open_checkpoint(Path(config.model_path))
        try:
            share = Share(source.shape, ranks.split, rank)
            need_memory(config, source, rank)
            runner, _, arrived = open_share(config, source, ranks)
            arrived()
        finally:
            source.close()
        give_back()
    except CheckpointError as error:
        channel.say(Refused(str(error)))
        return 1
    channel.say(Done())
    joining = channel.order()
    if not isinstance(joining, Join):
        return 0
    ranks.listen(joining.heard, share.whole)
    group = config.group
    meet(config, ranks, store_of(group, ranks.split.ranks, config.stall_s) if group else None)
    if group and group.place:
        # Where a leader's door is, for the agent to see that all have met.
        Path(config.socket).touch()
    while (order := channel.order()) is not None:
        obey(order, runner, share, channel)
    return 0


def obey(order: Order, runner: Runner, share: Share, channel: Channel) -> None:
    """Do what the front wants."""
    match order:
        case Run():
            runner.run(order)
        case Clear(blocks):
            runner.clear(blocks)
        case Copy(pairs):
            runner.copy(pairs)
        case Read(blocks):
            channel.say(Done(raw(runner.read_blocks(blocks))))
        case Write(blocks, contents):
            runner.write_blocks(blocks, shaped(contents, len(blocks), share, runner.kept_as))
        case Adapt():
            take(order, runner, share)
        case Forget(digest):
            del runner.adapters[digest]
        case _:
            raise ValueError(f"cannot obey {order!r} twice")
