"""The event loop of the agent's tests, and the priority of their engines."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from nodeagent.host import processes


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use uvloop, as the services do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _of_equal_priority() -> Iterator[None]:
    """Beside other suites an engine would wait for seconds in the middle of a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "NICENESS", 0)
        yield
