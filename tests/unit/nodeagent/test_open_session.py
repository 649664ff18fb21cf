"""The session of an engine that stopped is a lost connection, not a fault of the agent."""

import aiohttp
import pytest

from nodeagent.host.engines.open_session import open_session


async def test_a_closed_session_is_a_lost_connection() -> None:
    session = aiohttp.ClientSession()
    assert open_session(session) is session
    await session.close()
    with pytest.raises(aiohttp.ClientConnectionError, match="the engine has stopped"):
        open_session(session)
