"""An engine that stopped while two legs ran is a lost connection, not a fault of the agent."""

from time import monotonic
from typing import Any

import aiohttp
import pytest

from nodeagent.decide.prefill_leg import TransferRate
from nodeagent.disaggregation.two_legs import LegRequest, PrefillLeg
from nodeagent.host.open_session import open_session


async def test_a_closed_session_is_a_lost_connection() -> None:
    session = aiohttp.ClientSession()
    assert open_session(session) is session
    await session.close()
    with pytest.raises(aiohttp.ClientConnectionError, match="the engine has stopped"):
        open_session(session)


async def test_the_legs_of_a_stopped_engine_end_without_an_error() -> None:
    session = aiohttp.ClientSession("http://127.0.0.1:9")
    await session.close()
    unused: Any = None
    request = LegRequest(
        transfer="t", path="/", body=b"{}", sent={}, replicas=(), load=unused, announce=unused
    )
    leg = PrefillLeg(session, unused, TransferRate(), request, monotonic, unused)
    await leg._task
    await leg.close()
    assert leg.received is None
