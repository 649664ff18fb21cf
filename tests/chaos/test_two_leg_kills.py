"""kill -9 of either agent while requests with two legs are under way.

The engines are killed in tests/integration/nodeagent/test_two_legs.py; `python -m
ops.attack.two_leg_kills` kills all four parts at as many instants as wanted.
"""

from ops.attack.two_leg_kills import STREAMS, attack


async def test_an_agent_killed_under_load_loses_no_token_and_leaks_none() -> None:
    outcomes = await attack(range(1), 21, ("prefill agent", "decode agent"))
    (prefill,), (decode,) = outcomes["prefill agent"], outcomes["decode agent"]
    assert (prefill.whole, prefill.cut, prefill.none) == (STREAMS, 0, 0)
    assert decode.whole + decode.cut + decode.none == STREAMS
