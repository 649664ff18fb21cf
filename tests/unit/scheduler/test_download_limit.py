"""Downloads are counted by tenant: one with many slow clients leaves downloads for others."""

from contextlib import ExitStack

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.downloads import (
    DOWNLOADS_MAX,
    DOWNLOADS_PER_TENANT_MAX,
    DownloadLimit,
)


def test_a_tenant_has_its_share_of_downloads() -> None:
    limit = DownloadLimit()
    with ExitStack() as running:
        for _ in range(DOWNLOADS_PER_TENANT_MAX):
            running.enter_context(limit.counted("slow"))
        for _ in range(3):
            with pytest.raises(ApiError) as refused, limit.counted("slow"):
                pytest.fail("one more than its share")
            assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
        others = range(DOWNLOADS_MAX - DOWNLOADS_PER_TENANT_MAX)
        for number in others:
            running.enter_context(limit.counted(f"other {number}"))
        with pytest.raises(ApiError), limit.counted("last"):
            pytest.fail("one more than the scheduler sends")
    with limit.counted("slow"):
        pass
