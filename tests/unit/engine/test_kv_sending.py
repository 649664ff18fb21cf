"""What the sender of a prompt's KV says of its times."""

import asyncio

from nodeagent.engine.server.kv.kv_sending import ComputedBlocks


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
