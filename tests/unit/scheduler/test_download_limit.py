"""Downloads are shared between tenants: those with many slow clients leave downloads for others."""

from contextlib import ExitStack, suppress

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.downloads import (
    DOWNLOADS_MAX,
    MEASURED_S,
    RATE_MIN_BYTES_PER_S,
    Download,
    DownloadLimit,
)


def never() -> None:
    pytest.fail("it need not give way")


def fill(
    limit: DownloadLimit, running: ExitStack, ended: list[Download], tenants: str = "abcdefgh"
) -> list[Download]:
    """Let tenants take all downloads, each as many as it may have."""
    downloads: list[Download] = []
    for tenant_id in tenants:
        with suppress(ApiError):
            while True:
                number = len(downloads)
                end = lambda number=number: ended.append(downloads[number])  # noqa: E731
                downloads.append(running.enter_context(limit.counted(tenant_id, end)))
    assert len(downloads) == DOWNLOADS_MAX
    return downloads


def test_of_all_downloads_the_slowest_gives_way_to_another_tenant() -> None:
    """Eight tenants with slow clients kept all others from their files."""
    now_s, ended = 0.0, list[Download]()
    limit = DownloadLimit(lambda: now_s)
    with ExitStack() as running:
        downloads = fill(limit, running, ended)
        with pytest.raises(ApiError), limit.counted("other", never):
            pytest.fail("none was measured for long enough")
        now_s = 2 * MEASURED_S
        for download in downloads:
            download.sent_bytes = int(2 * MEASURED_S * RATE_MIN_BYTES_PER_S)
        downloads[70].sent_bytes -= 1
        downloads[3].sent_bytes = 1
        running.enter_context(limit.counted("other", never))
        assert ended == [downloads[3]]
        assert downloads[3].tenant_id == "a"
        with pytest.raises(ApiError), limit.counted("a", never):
            pytest.fail("more than half of all are its own")
        with pytest.raises(ApiError), limit.counted("other", never):
            pytest.fail("it would have more than are free, and only one more is slow")
        assert ended == [downloads[3]]
        running.enter_context(limit.counted("third", never))
    with ExitStack() as alone:
        for _ in range(DOWNLOADS_MAX // 2):
            alone.enter_context(limit.counted("a", never))


def test_a_tenant_does_not_end_its_own_downloads() -> None:
    now_s, ended = 0.0, list[Download]()
    limit = DownloadLimit(lambda: now_s)
    with ExitStack() as running:
        fill(limit, running, ended)
        now_s = MEASURED_S
        with pytest.raises(ApiError), limit.counted("a", never):
            pytest.fail("it has half of all")
        assert ended == []


def test_tenants_with_slow_clients_leave_downloads_for_another() -> None:
    """Four of them had all: each had a quarter, whatever was free."""
    limit = DownloadLimit(lambda: 0.0)
    with ExitStack() as running:
        for tenant_id in ("a", "b", "c", "d"):
            with suppress(ApiError):
                for _ in range(DOWNLOADS_MAX):
                    running.enter_context(limit.counted(tenant_id, never))
        with pytest.raises(ApiError) as refused, limit.counted("a", never):
            pytest.fail("one more than its share")
        assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
        for _ in range(4):
            running.enter_context(limit.counted("other", never))
    with ExitStack() as alone:
        for _ in range(DOWNLOADS_MAX // 2):
            alone.enter_context(limit.counted("a", never))
