"""Each host of a DSN gets its own timeout, and a transaction pooler is known even when idle."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler.store import pool


class Backends:
    """Assigns backends to clients, for a session or for a transaction."""

    def __init__(self, *, per_transaction: bool, lends_last_used: bool = True) -> None:
        self.per_transaction = per_transaction
        self.lends_last_used = lends_last_used
        self.idle = [1, 2, 3]
        self.clients = 0

    async def connect(self, hosts: list[str], options: dict[str, Any]) -> "Client":
        self.clients += 1
        return Client(self)


class Client:
    """One connection, with the methods that the probe uses."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        self.own = None if backends.per_transaction else backends.idle.pop()
        self.held: int | None = None

    async def fetchval(self, query: str) -> int:
        assert query == "SELECT pg_backend_pid()"
        if self.own or self.held:
            return self.own or self.held or 0
        pid = self.backends.idle.pop(-1 if self.backends.lends_last_used else 0)
        self.backends.idle.append(pid)
        return pid

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        if not self.own:
            self.held = self.backends.idle.pop(-1 if self.backends.lends_last_used else 0)
        yield
        if self.held:
            self.backends.idle.append(self.held)
            self.held = None

    async def close(self) -> None:
        self.backends.clients -= 1


@pytest.mark.parametrize(
    ("backends", "is_pooled"),
    [
        (Backends(per_transaction=False), False),
        (Backends(per_transaction=True), True),
        (Backends(per_transaction=True, lends_last_used=False), True),
    ],
    ids=["postgres", "last used first", "in turn"],
)
async def test_a_pooler_is_detected_even_when_idle(
    monkeypatch: pytest.MonkeyPatch, backends: Backends, is_pooled: bool
) -> None:
    monkeypatch.setattr(pool, "_connect", backends.connect)
    assert await pool._has_transaction_pooler(["dsn"]) is is_pooled
    assert backends.clients == 0


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        ("postgresql://u:p@h1:1,h2/db", ["postgresql://u:p@h1:1/db", "postgresql://u:p@h2/db"]),
        ("postgresql://u@/db?host=/run/a b", ["postgresql://u@/db?host=/run/a%20b"]),
        (
            "postgresql://u@/db?host=/run/a,/run/b&user=x",
            ["postgresql://u@/db?host=/run/a&user=x", "postgresql://u@/db?host=/run/b&user=x"],
        ),
        (
            "postgresql://u@/db?host=/run/a,h2&port=5433",
            ["postgresql://u@/db?host=/run/a&port=5433", "postgresql://u@/db?host=h2&port=5433"],
        ),
        (
            "postgresql://u@/db?host=h1,h2&port=1,",
            ["postgresql://u@/db?host=h1&port=1", "postgresql://u@/db?host=h2"],
        ),
    ],
)
def test_each_host_of_a_dsn_has_one_of_its_own(dsn: str, hosts: list[str]) -> None:
    assert pool._each_host(dsn) == hosts


def test_a_dsn_with_too_few_ports_is_refused() -> None:
    with pytest.raises(pool.UNAVAILABLE, match="3 hosts and 2 ports"):
        pool._each_host("postgresql://u@/db?host=a,b,c&port=1,2")
