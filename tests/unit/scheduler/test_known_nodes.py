import threading
from typing import Any, cast

from scheduler.store.known_nodes import MANY, made


async def test_few_rows_are_read_at_once_and_many_in_a_thread() -> None:
    where = []

    def count(rows: Any, more: int) -> int:
        where.append(threading.get_ident())
        return len(rows) + more

    assert await made(count, cast(Any, range(3)), 1) == 4
    assert await made(count, cast(Any, range(MANY)), 1) == MANY + 1
    here = threading.get_ident()
    assert [ident == here for ident in where] == [True, False]
