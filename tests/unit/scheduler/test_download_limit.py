"""Downloads are shared between tenants: those with many slow clients leave downloads for others."""

from contextlib import ExitStack, suppress

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.downloads import DOWNLOADS_MAX, DownloadLimit


def test_tenants_with_slow_clients_leave_downloads_for_another() -> None:
    """Four of them had all: each had a quarter, whatever was free."""
    limit = DownloadLimit()
    with ExitStack() as running:
        for tenant_id in ("a", "b", "c", "d"):
            with suppress(ApiError):
                for _ in range(DOWNLOADS_MAX):
                    running.enter_context(limit.counted(tenant_id))
        with pytest.raises(ApiError) as refused, limit.counted("a"):
            pytest.fail("one more than its share")
        assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
        for _ in range(4):
            running.enter_context(limit.counted("other"))
    with ExitStack() as alone:
        for _ in range(DOWNLOADS_MAX // 2):
            alone.enter_context(limit.counted("a"))
