"""A database that fails before a chosen statement, or just after a COMMIT.

Before a statement, the backend is terminated as in a failover. After a COMMIT, the transaction is
committed but its caller gets an error and cannot know.
"""

from collections.abc import Callable
from typing import Any, Final

import asyncpg
import pytest

COMMIT: Final = "COMMIT;"


class Faults:
    """Records the statements of every connection of this process, and fails chosen ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
        self.told: list[str] = []
        self.broken: list[str] = []
        self._dsn = dsn
        self._doing: dict[asyncpg.Connection, str] = {}
        self._before: Callable[[], bool] = _never
        self._lost: Callable[[str], bool] = _is_none
        for name in ("execute", "_execute", "_executemany"):
            monkeypatch.setattr(asyncpg.Connection, name, self._breaking(name))

    def break_before(self, number: int) -> None:
        """Terminate the backend before the `number`-th statement from now; the next one is 1."""
        wanted = len(self.told) + number
        self._before = lambda: len(self.told) == wanted

    def lose_commit(self, doing: str = "") -> None:
        """Break the connection after the next COMMIT of a transaction that ran `doing`."""
        self._lost = lambda told: doing in told

    def mend(self) -> None:
        """Fail no further statements."""
        self._before, self._lost = _never, _is_none

    def _breaking(self, name: str) -> Any:
        original = getattr(asyncpg.Connection, name)

        async def ask(connection: asyncpg.Connection, query: str, *rest: Any, **given: Any) -> Any:
            if name == "execute" and rest:
                # This calls `_execute`, which is patched too.
                return await original(connection, query, *rest, **given)
            self.told.append(query)
            if self._before():
                self.broken.append(query)
                self.mend()
                await self._end(connection.get_server_pid())
            doing = self._doing.pop(connection, "")
            answer = await original(connection, query, *rest, **given)
            if query != COMMIT:
                self._doing[connection] = doing + query
            elif self._lost(doing):
                self.broken.append(query)
                self.mend()
                connection.terminate()
                raise asyncpg.ConnectionDoesNotExistError("closed in the middle of operation")
            return answer

        return ask

    async def _end(self, pid: int) -> None:
        other = await asyncpg.connect(self._dsn)
        await other.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
        await other.close()


def _never() -> bool:
    return False


def _is_none(_: str) -> bool:
    return False
