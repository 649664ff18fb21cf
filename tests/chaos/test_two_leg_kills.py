"""kill -9 of either agent while requests with two legs are under way, and of parts of a PoP while
they fetch KV.

The engines of two legs are killed in tests/integration/nodeagent/test_two_legs.py; `python -m
ops.attack.two_leg_kills` and `fetch_kills` kill all four parts at as many instants as wanted.
"""

from ops.attack.fetch_kills import Fetches
from ops.attack.two_leg_kills import STREAMS, attack

KV_ARRIVING = range(1, 2)
"""The instant at which KV is arriving, and nobody else has it."""


async def test_an_agent_killed_under_load_loses_no_token_and_leaks_none() -> None:
    outcomes = await attack(range(1), 21, ("prefill agent", "decode agent"))
    (prefill,), (decode,) = outcomes["prefill agent"], outcomes["decode agent"]
    assert (prefill.whole, prefill.cut, prefill.none) == (STREAMS, 0, 0)
    assert decode.whole + decode.cut + decode.none == STREAMS


async def test_a_holder_killed_while_its_kv_is_fetched_loses_no_token_and_leaks_none() -> None:
    outcomes = await attack(KV_ARRIVING, 21, ("holder engine", "fetching agent"), use=Fetches())
    (holder,), (fetching,) = outcomes["holder engine"], outcomes["fetching agent"]
    assert (holder.whole, holder.cut, holder.none) == (STREAMS, 0, 0)
    assert fetching.whole + fetching.cut + fetching.none == STREAMS
