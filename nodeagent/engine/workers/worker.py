"""A worker process: loads its shard of the model, then executes commands until rank 0 ends."""

import os
import signal
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Never

from isochrone.service.logs import setup_logs
from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.peers.assignment import ReplicaGroup
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.kernels.huge_pages import trim_heap
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
from nodeagent.engine.workers.shard_loading import (
    check_memory,
    connect_ranks,
    load_shard,
    local_ranks,
    parallel_config,
)
from nodeagent.engine.workers.worker_group import CommandChannel, exit_after, run_as_rank


def run_remote_workers(config: EngineConfig, group: ReplicaGroup) -> Never:
    """Run this node's ranks of a group whose rank 0 is on another node, until they end.

    This process is the first of them; it forks the others.
    """

    def run(rank: int) -> int:
        setup_logs(f"engine-rank-{rank}")
        connections = dial_rank0(group, rank, config.join_s)
        exit_after(connections.liveness.fileno())
        return run_worker(config, rank, CommandChannel(connections.commands))

    def run_forked(parent_pid: int, rank: int) -> int:
        exit_after(os.pidfd_open(parent_pid))
        return run(rank)

    first, *others = local_ranks(config)
    forked, parent_pid = [], os.getpid()
    for rank in others:
        pid = os.fork()
        if pid == 0:
            run_as_rank(rank, partial(run_forked, parent_pid, rank))
        forked.append(pid)

    def has_failed_child(options: int) -> bool:
        ended = (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) for pid in forked)
        return any(child is not None and child.si_status != 0 for child in ended)

    def on_child_ended(number: int, frame: FrameType | None) -> None:
        # Otherwise rank 0 would wait for a rank that ended before it connected.
        if has_failed_child(os.WNOHANG):
            os._exit(1)

    signal.signal(signal.SIGCHLD, on_child_ended)
    on_child_ended(signal.SIGCHLD, None)
    # Rank 0 may notice a rank's end, and end, before this process is signalled.
    run_as_rank(first, lambda: run(first) or has_failed_child(0))


def run_worker(config: EngineConfig, rank: int, channel: CommandChannel) -> int:
    """Load the shard of `rank` and execute commands until rank 0 ends; return the exit code."""
    setup_logs(f"engine-rank-{rank}")
    if channel.receive_command() is None:
        return 0
    communicator = Communicator(parallel_config(config), rank)
    try:
        source = open_checkpoint(Path(config.model_path))
        try:
            shard = ModelShard(source.shape, communicator.split, rank)
            check_memory(config, source, rank)
            loaded = load_shard(config, source, communicator)
            loaded.wait_weights()
        finally:
            source.close()
        trim_heap()
    except CheckpointError as error:
        channel.reply(ShardRefused(str(error)))
        return 1
    channel.reply(CommandDone())
    joining = channel.receive_command()
    if not isinstance(joining, JoinGroup):
        return 0
    communicator.forward_layer_inputs(joining.layer_inputs, shard.whole)
    group, ranks = config.group, communicator.split.ranks
    store = open_store(group, ranks, config.stall_s) if group is not None else None
    connect_ranks(config, communicator, store)
    if group is not None and group.place:
        # This file is where the engine's socket is on the leader. It shows the agent of this node
        # that all ranks are connected.
        Path(config.socket).touch()
    while (command := channel.receive_command()) is not None:
        execute(command, loaded.runner, shard, channel)
    return 0


def execute(
    command: Command, runner: ModelRunner, shard: ModelShard, channel: CommandChannel
) -> None:
    """Execute one command of rank 0."""
    match command:
        case RunStep():
            runner.run(command)
        case ClearBlocks(blocks):
            runner.clear(blocks)
        case CopyBlocks(copies):
            runner.copy(copies)
        case ReadBlocks(blocks):
            channel.reply(CommandDone(tensor_bytes(runner.read_blocks(blocks))))
        case WriteBlocks(blocks, contents):
            part = shard_blocks(contents, len(blocks), shard, runner.kv_dtype)
            runner.write_blocks(blocks, part)
        case AddAdapter():
            keep_adapter_shard(command, runner, shard)
        case RemoveAdapter(digest):
            del runner.adapters[digest]
        case _:
            raise ValueError(f"cannot execute {command!r}: it starts a worker, and this one runs")
