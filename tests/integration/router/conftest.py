"""The event loop of the router's integration tests."""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on the loop that the services run on."""
    return {"uvloop": uvloop.new_event_loop}
