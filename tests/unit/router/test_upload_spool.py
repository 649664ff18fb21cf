"""How much of the disk the uploads of a tenant, and of all, may take while they arrive."""

from pathlib import Path

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.routes import KeyEntry
from router.config import RouterConfig
from router.dataplane.http_messages import HttpRequest
from router.dataplane.upload_spool import SpooledBody, UploadSpool

MIB = 1 << 20


@pytest.fixture
def spool(tmp_path: Path) -> UploadSpool:
    config = RouterConfig(
        state_folder=tmp_path, uploads_bytes_per_tenant_max=3 * MIB, uploads_bytes_max=5 * MIB
    )
    return UploadSpool(tmp_path / "uploads", config)


def opened(spool: UploadSpool, tenant: str) -> SpooledBody:
    request = HttpRequest()
    request.method, request.path = b"POST", "/v1/files"
    request.key = KeyEntry(
        key_id=KeyId("k" * 12), secret_sha256="0" * 64, tenant_id=TenantId(tenant)
    )
    upload = spool.open(request)
    assert upload is not None
    return upload


def test_one_tenants_unfinished_uploads_leave_space_for_others(spool: UploadSpool) -> None:
    first, second, other = (opened(spool, tenant) for tenant in ("flood", "flood", "small"))
    first.write(bytes(2 * MIB))
    second.write(bytes(MIB))
    with pytest.raises(ApiError) as refused:
        second.write(b"x")
    assert refused.value.code is ErrorCode.RATE_LIMITED
    other.write(bytes(2 * MIB))
    with pytest.raises(ApiError) as full:
        other.write(b"x")
    assert full.value.code is ErrorCode.UNAVAILABLE
    # What was refused is not counted, and what was dropped is free again.
    first.close()
    first.close()
    second.write(bytes(2 * MIB))
    for upload in (second, other):
        upload.close()
    last = opened(spool, "flood")
    last.write(bytes(3 * MIB))
    last.close()


def test_an_upload_is_dropped_although_the_disk_is_full(spool: UploadSpool) -> None:
    """Else the requests behind it on its connection went on, for a client that has left."""
    upload = opened(spool, "flood")
    upload._file.close()
    # A file keeps a few bytes back until it is closed.
    with Path("/dev/full").open("wb") as full:
        upload._file = full
        upload.write(b"x")
        upload.close()
        assert full.closed
    assert spool._by_tenant == {}
