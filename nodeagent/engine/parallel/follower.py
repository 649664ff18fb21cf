"""What a rank other than the front does: load its share, then what it is told, until the end."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Never

from torch.distributed import Store

from isochrone.service.logs import setup_logs
from isochrone.wire.assignment import Group
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.checkpoint.opening import open_weights
from nodeagent.engine.loading import meet, need_memory, open_share, ranks_here, split_of
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.parallel.crew import Channel, become
from nodeagent.engine.parallel.front import raw, shaped
from nodeagent.engine.parallel.group import dial, store_of
from nodeagent.engine.parallel.plan import Clear, Done, Order, Read, Refused, Run, Write
from nodeagent.engine.parallel.ranks import Ranks
from nodeagent.engine.parallel.share import Share
from nodeagent.engine.runner import Runner


def follow_from_afar(config: EngineConfig, group: Group) -> Never:
    """Be this node's ranks of a group that another node leads, to its end."""

    def live(rank: int) -> int:
        setup_logs(f"engine-rank-{rank}")
        lines = dial(group, rank, config.join_s)
        world, timeout_s = split_of(config).ranks, config.stall_s
        store = partial(store_of, group, lines, world, timeout_s)
        return follow(config, rank, Channel(lines.orders), store)

    first, *others = ranks_here(config)
    for rank in others:
        if os.fork() == 0:
            become(rank, partial(live, rank))
    # The front would wait for one that ends before it has dialled.
    signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(1))
    become(first, partial(live, first))


def follow(
    config: EngineConfig, rank: int, channel: Channel, store: Callable[[], Store] | None = None
) -> int:
    """Follow the front to its end; return the process's exit code."""
    setup_logs(f"engine-rank-{rank}")
    if channel.order() is None:
        return 0
    ranks = Ranks(split_of(config), rank)
    try:
        source = open_weights(Path(config.model_path))
        try:
            share = Share(source.shape, ranks.split, rank)
            need_memory(config, source.shape, rank)
            runner, _ = open_share(config, source, ranks)
        finally:
            source.close()
    except CheckpointError as error:
        channel.say(Refused(str(error)))
        return 1
    channel.say(Done())
    if channel.order() is None:
        return 0
    meet(config, ranks, store() if store else None)
    if store:
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
        case Read(blocks):
            channel.say(Done(raw(runner.read_blocks(blocks))))
        case Write(blocks, contents):
            runner.write_blocks(blocks, shaped(contents, len(blocks), share, runner.kept_as))
        case _:
            raise ValueError(f"cannot obey {order!r} twice")
