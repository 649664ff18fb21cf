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
        self.statements: list[str] = []
        """All statements that were sent."""
        self.broken: list[str] = []
        """The statements that failed."""
        self._dsn = dsn
        self._ran: dict[asyncpg.Connection, str] = {}
        """The statements of each connection's transaction, joined."""
        self._breaks_next: Callable[[], bool] = _never
        self._loses_commit: Callable[[str], bool] = _never_commit
        for name in ("execute", "_execute", "_executemany"):
            monkeypatch.setattr(asyncpg.Connection, name, self._breaking(name))

    def break_before(self, number: int) -> None:
        """Terminate the backend before the `number`-th statement from now; the next one is 1."""
        wanted = len(self.statements) + number
        self._breaks_next = lambda: len(self.statements) == wanted

    def lose_commit(self, doing: str = "") -> None:
        """Break the connection after the next COMMIT of a transaction that ran `doing`."""
        self._loses_commit = lambda statements: doing in statements

    def mend(self) -> None:
        """Fail no further statements."""
        self._breaks_next, self._loses_commit = _never, _never_commit

    def _breaking(self, name: str) -> Any:
        original = getattr(asyncpg.Connection, name)

        async def run(connection: asyncpg.Connection, query: str, *rest: Any, **named: Any) -> Any:
            if name == "execute" and rest:
                # This calls `_execute`, which is patched too.
                return await original(connection, query, *rest, **named)
            self.statements.append(query)
            if self._breaks_next():
                self.broken.append(query)
                self.mend()
                await self._end(connection.get_server_pid())
            ran = self._ran.pop(connection, "")
            answer = await original(connection, query, *rest, **named)
            if query != COMMIT:
                self._ran[connection] = ran + query
            elif self._loses_commit(ran):
                self.broken.append(query)
                self.mend()
                connection.terminate()
                raise asyncpg.ConnectionDoesNotExistError("closed in the middle of operation")
            return answer

        return run

    async def _end(self, pid: int) -> None:
        other = await asyncpg.connect(self._dsn)
        await other.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
        await other.close()


def _never() -> bool:
    return False


def _never_commit(_: str) -> bool:
    return False
