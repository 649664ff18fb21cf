"""What a rank other than the front does: load its share, then what it is told, until the end."""

from pathlib import Path

from isochrone.service.logs import setup_logs
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.checkpoint.opening import open_weights
from nodeagent.engine.loading import meet, need_memory, open_share, split_of
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.parallel.crew import Channel
from nodeagent.engine.parallel.front import raw, shaped
from nodeagent.engine.parallel.plan import Clear, Done, Order, Read, Refused, Run, Write
from nodeagent.engine.parallel.ranks import Ranks
from nodeagent.engine.parallel.share import Share
from nodeagent.engine.runner import Runner


def follow(config: EngineConfig, rank: int, channel: Channel) -> int:
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
    meet(config, ranks)
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
