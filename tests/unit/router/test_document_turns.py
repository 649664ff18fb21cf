"""Which tenant's document is converted next, and which is refused."""

import asyncio
from collections.abc import Sequence

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from router.apis.workers_ai.markdown import UploadedDocument, convert_all
from router.documents.converter import (
    AT_ONCE_MAX,
    WAITING_MAX,
    ConvertedDocument,
    DocumentConverter,
)


class SlowConverter(DocumentConverter):
    """Converts a document when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def _run(self, extension: str, document: bytes, charset: str) -> ConvertedDocument:
        name = document.decode()
        self.begun.append(name)
        await self.ends.setdefault(name, asyncio.Event()).wait()
        return ConvertedDocument(data=name)

    def end(self, name: str) -> None:
        self.ends[name].set()


async def turned() -> None:
    """Let all tasks go on as far as they can."""
    loop = asyncio.get_running_loop()
    for _ in range(10):
        passed = loop.create_future()
        loop.call_soon(passed.set_result, None)
        await passed


def sent(
    converter: SlowConverter, tenant: str, names: Sequence[str]
) -> list[asyncio.Task[ConvertedDocument]]:
    return [
        asyncio.create_task(converter.convert(TenantId(tenant), "a.txt", name.encode()))
        for name in names
    ]


async def test_a_tenant_with_many_documents_waits_behind_its_own() -> None:
    converter = SlowConverter()
    names = [f"flood-{number}" for number in range(AT_ONCE_MAX + WAITING_MAX)]
    flood = sent(converter, "flood", names)
    await turned()
    assert converter.begun == names[:AT_ONCE_MAX]
    (one_more,) = sent(converter, "flood", ["flood-more"])
    with pytest.raises(ApiError) as refused:
        await one_more
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
    # Another tenant takes the place of the last one, and waits for one of them.
    (small,) = sent(converter, "small", ["small"])
    with pytest.raises(ApiError):
        await flood.pop()
    for name in names[:2]:
        converter.end(name)
        await turned()
    assert converter.begun == [*names[: AT_ONCE_MAX + 1], "small"]
    converter.end("small")
    assert (await small).data == "small"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_client_that_leaves_gives_back_its_turn() -> None:
    converter = SlowConverter()
    tasks = sent(converter, "one", ["a", "b", "c", "d"])
    await turned()
    tasks[0].cancel()  # it runs
    tasks[2].cancel()  # it waits, and its turn comes in the same moment
    await turned()
    assert converter.begun == ["a", "b", "d"]
    for name in ("b", "d"):
        converter.end(name)
    assert [(await task).data for task in (tasks[1], tasks[3])] == ["b", "d"]
    (last,) = sent(converter, "one", ["e"])
    await turned()
    converter.end("e")
    assert (await last).data == "e"


async def test_documents_that_are_late_have_an_error_and_leave_their_turns() -> None:
    converter = SlowConverter()
    files = [UploadedDocument(f"{name}.txt", name.encode()) for name in ("quick", "slow", "queued")]
    converter.ends["quick"] = asyncio.Event()
    converter.end("quick")
    quick, *late = await convert_all(converter, TenantId("t"), files, within_s=0.05)
    assert quick == ConvertedDocument(data="quick")
    assert all("within 0.05 s" in document.error for document in late)
    sent(converter, "t", names := [f"next-{number}" for number in range(AT_ONCE_MAX)])
    await turned()
    assert converter.begun[-AT_ONCE_MAX:] == names


async def test_if_one_document_is_refused_the_others_of_its_request_end() -> None:
    converter = SlowConverter()
    files = [UploadedDocument("a.txt", str(number).encode()) for number in range(30)]
    with pytest.raises(ApiError) as refused:
        await convert_all(converter, TenantId("t"), files)
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
    sent(converter, "t", ["next"])
    await turned()
    assert converter.begun[-1] == "next"
