"""Makes the use of a stopped engine's HTTP session a connection error, as its absence is.

aiohttp raises RuntimeError there, which reads like a fault of the program.
"""

import aiohttp


def open_session(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """Return `session`. Raises aiohttp.ClientConnectionError if it was closed."""
    if session.closed:
        raise aiohttp.ClientConnectionError("the engine has stopped")
    return session
