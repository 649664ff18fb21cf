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
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.kernels.huge_pages import trim_heap
from nodeagent.engine.loading import (
    check_memory,
    connect_ranks,
    load_shard,
    local_ranks,
    parallel_config,
)
from nodeagent.engine.weights.checkpoint import open_checkpoint
from nodeagent.engine.workers.adapter_shards import keep_adapter_shard, tensor_bytes
from nodeagent.engine.workers.commands import (
    AddAdapter,
    ClearBlocks,
    Command,
    CommandDone,
    CopyBlocks,
    JoinGroup,
    ReadBlocks,
    RemoveAdapter,
    RunStep,
    ShardRefused,
    WriteBlocks,
)
from nodeagent.engine.workers.rank0 import shard_blocks
from nodeagent.engine.workers.rendezvous import dial_rank0, open_store
from nodeagent.engine.workers.worker_group import CommandChannel, exit_after, run_as_rank


def run_remote_workers(config: EngineConfig, group: Group) -> Never:
    """Be this node's ranks of a group that another node leads, to its end."""

    def live(rank: int) -> int:
        setup_logs(f"engine-rank-{rank}")
        lines = dial_rank0(group, rank, config.join_s)
        exit_after(lines.life.fileno())
        return run_worker(config, rank, CommandChannel(lines.orders))

    def live_with(parent: int, rank: int) -> int:
        exit_after(os.pidfd_open(parent))
        return live(rank)

    first, *others = local_ranks(config)
    forked, parent = [], os.getpid()
    for rank in others:
        pid = os.fork()
        if pid == 0:
            run_as_rank(rank, partial(live_with, parent, rank))
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
    run_as_rank(first, lambda: live(first) or failed(0))


def run_worker(config: EngineConfig, rank: int, channel: CommandChannel) -> int:
    """Follow the front to its end; return the process's exit code."""
    setup_logs(f"engine-rank-{rank}")
    if channel.order() is None:
        return 0
    ranks = Communicator(parallel_config(config), rank)
    try:
        source = open_checkpoint(Path(config.model_path))
        try:
            share = ModelShard(source.shape, ranks.split, rank)
            check_memory(config, source, rank)
            runner, _, arrived = load_shard(config, source, ranks)
            arrived()
        finally:
            source.close()
        trim_heap()
    except CheckpointError as error:
        channel.say(ShardRefused(str(error)))
        return 1
    channel.say(CommandDone())
    joining = channel.order()
    if not isinstance(joining, JoinGroup):
        return 0
    ranks.listen(joining.heard, share.whole)
    group = config.group
    connect_ranks(
        config, ranks, open_store(group, ranks.split.ranks, config.stall_s) if group else None
    )
    if group and group.place:
        # Where a leader's door is, for the agent to see that all have met.
        Path(config.socket).touch()
    while (order := channel.order()) is not None:
        execute(order, runner, share, channel)
    return 0


def execute(
    order: Command, runner: ModelRunner, share: ModelShard, channel: CommandChannel
) -> None:
    """Do what the front wants."""
    match order:
        case RunStep():
            runner.run(order)
        case ClearBlocks(blocks):
            runner.clear(blocks)
        case CopyBlocks(pairs):
            runner.copy(pairs)
        case ReadBlocks(blocks):
            channel.say(CommandDone(tensor_bytes(runner.read_blocks(blocks))))
        case WriteBlocks(blocks, contents):
            runner.write_blocks(blocks, shard_blocks(contents, len(blocks), share, runner.kv_dtype))
        case AddAdapter():
            keep_adapter_shard(order, runner, share)
        case RemoveAdapter(digest):
            del runner.adapters[digest]
        case _:
            raise ValueError(f"cannot obey {order!r} twice")
