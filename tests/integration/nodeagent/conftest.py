"""The event loop of the agent's tests."""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use uvloop, as the services do."""
    return {"uvloop": uvloop.new_event_loop}
