"""Limits the interim answers (1xx) that an engine or another node may send before its answer.

aiohttp has no such limit: it takes one after the other without a pause, and keeps all that have
arrived. One request was enough to hold up the agent for as long as its engine went on.
"""

from functools import partial
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp.client_proto import ResponseHandler

Connector = TypeVar("Connector", bound=aiohttp.BaseConnector)

INTERIM_MAX: Final = 64
"""A node sends two or three: that it has handed a request off, and where its prompt is read."""


class LimitedAnswers(ResponseHandler):
    """The client's side of a connection, which ends with one interim answer too many."""

    _interim = 0

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take the head of an answer."""
        if self.exception() is not None:
            return
        status = data[0].code
        is_interim = 100 <= status < 200 and status != 101
        self._interim = self._interim + 1 if is_interim else 0
        if self._interim <= INTERIM_MAX:
            super().feed_data(data, size)
        else:
            reason = f"more than {INTERIM_MAX} interim answers"
            self.close()
            self.set_exception(aiohttp.ClientPayloadError(f"cannot read the answer: {reason}"))


def with_few_interim_answers(connector: Connector) -> Connector:
    """Return `connector`, whose connections take few interim answers."""
    make: Any = partial(LimitedAnswers, loop=connector._loop)
    connector._factory = make
    return connector
