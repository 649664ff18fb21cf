"""What the sender of a prompt's KV says of its times, and what it does not send."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodeagent.engine.core.kv_transfers import OutgoingBlocks
from nodeagent.engine.server.kv.kv_sending import ComputedBlocks, OutgoingReader
from nodeagent.engine.server.kv.kv_writing import BlockDestination


def test_the_time_of_a_transfer_counts_from_the_end_of_the_prompt() -> None:
    now_s = 10.0

    async def transfer() -> None:
        nonlocal now_s
        computed = ComputedBlocks(lambda: now_s)
        computed.record(3, began_s=11.0)
        now_s = 20.0
        computed.end()
        # The receiver is slow: the writer ends the waits of its thread once it has sent all.
        now_s = 25.0
        computed.end()
        now_s = 26.0
        assert computed.ended_before_s() == 6.0
        assert not computed.more_than(3)

    asyncio.run(transfer())


def test_blocks_are_not_sent_if_their_prompt_fails_while_they_are_read() -> None:
    """They are cleared, and would look like those of the prompt at the receiver."""
    outgoing = OutgoingBlocks(0, 1, lambda computed, began_s: None)
    outgoing.blocks.append(7)

    def read_held(blocks: list[int], out: torch.Tensor) -> torch.Tensor:
        assert blocks == [7]
        outgoing.is_closed = True
        return out

    def put(*part: object) -> None:
        raise AssertionError("nothing may be sent")

    out = torch.zeros(1, 1)
    writer: Any = SimpleNamespace(
        next_destination=lambda count: BlockDestination(count, None, out), put=put
    )
    transfers: Any = SimpleNamespace(can_copy_beside_steps=True, read_held=read_held)
    computed: Any = SimpleNamespace(blocks=1, more_than=lambda blocks: blocks < 1)
    worker: Any = None
    reader = OutgoingReader(worker, transfers, 1, outgoing, computed)
    with pytest.raises(ConnectionResetError, match="the transfer was closed"):
        reader.read_all(writer, [b"d"])
