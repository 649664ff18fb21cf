"""Turns the use of a stopped engine's HTTP session into a connection error.

aiohttp raises RuntimeError there, which looks like a bug.
"""

import aiohttp


def open_session(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """Return `session`. Raises aiohttp.ClientConnectionError if it was closed."""
    if session.closed:
        raise aiohttp.ClientConnectionError("the engine has stopped")
    return session
