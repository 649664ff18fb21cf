"""Uploads of adapters: what they keep in memory, and where their headers are read."""

import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.models.adapter_files import HEADER_BYTES_MAX, LENGTH_BYTES
from isochrone.wire.peers.adapter import WEIGHTS_FILE
from scheduler.api.client_objects import adapter_intake
from scheduler.api.client_objects.adapter_intake import AdapterIntake
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.client_objects.adapters import AdapterFile

UPLOADS = 3


class LongHeader:
    """Sends weights that are nothing but the longest header."""

    def __init__(self) -> None:
        self._left = LENGTH_BYTES + HEADER_BYTES_MAX

    async def read_chunk(self, size: int) -> bytes:
        if self._left == LENGTH_BYTES + HEADER_BYTES_MAX:
            size = LENGTH_BYTES
        size = min(size, self._left)
        self._left -= size
        return HEADER_BYTES_MAX.to_bytes(size, "little") if size else b""


async def test_the_headers_of_uploads_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Each kept up to 16 MiB until its turn came, and routers relay hundreds at a time."""
    intake = AdapterIntake(BatchFolder(tmp_path, free_bytes_min=0), AdapterLimits())
    tracemalloc.start()
    try:
        uploaded = [await intake.write("acme", LongHeader().read_chunk) for _ in range(UPLOADS)]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {file.size_bytes for file in uploaded} == {LENGTH_BYTES + HEADER_BYTES_MAX}
    assert kept_bytes < HEADER_BYTES_MAX


async def test_headers_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with 188,000 tensors stopped it for 0.7 s."""

    async def no_model(*_: object) -> None:
        return

    monkeypatch.setattr(adapter_intake, "get_model", no_model)
    monkeypatch.setattr(adapter_intake, "_checked_rank", lambda *_: threading.get_ident())
    (tmp_path / "file-1").write_bytes((2).to_bytes(LENGTH_BYTES, "little") + b"{}")
    intake = AdapterIntake(BatchFolder(tmp_path), AdapterLimits())
    adapter: Any = SimpleNamespace(tenant_id="acme", model_id="m")
    file = AdapterFile(path=WEIGHTS_FILE, size_bytes=10, sha256="", file_id="file-1")
    connection: Any = None
    assert await intake._check(connection, adapter, [file]) != threading.get_ident()
