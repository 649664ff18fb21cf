"""Uploads to a disk that is almost full, or full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects import uploads
from scheduler.api.client_objects.uploads import write_upload
from scheduler.state.files.batch_folder import BatchFolder

BYTES_MAX = 1 << 20


class FullDisk(BatchFolder):
    """Every write of a file fails for lack of space."""

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        with Path("/dev/full").open("wb", buffering=0) as output:
            yield output


class Sender:
    """Sends some chunks of 1000 bytes."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks

    async def read_chunk(self, _size: int) -> bytes:
        self.left -= 1
        return bytes(1000) if self.left >= 0 else b""


async def refusal(folder: BatchFolder, sender: Sender) -> str:
    with pytest.raises(ApiError) as refused:
        await write_upload(folder, "file-1", sender.read_chunk, bytes_max=BYTES_MAX)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    return refused.value.message


async def test_uploads_leave_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sender = BatchFolder(tmp_path, free_bytes_min=1 << 60), Sender(9)
    assert "almost full" in await refusal(folder, sender)
    assert sender.left == 9, "nothing of the upload was read"
    # Others fill the disk while it arrives.
    monkeypatch.setattr(uploads, "SPACE_CHECK_BYTES", 2500)
    roomy, answers = BatchFolder(tmp_path), iter((True, True, False))
    monkeypatch.setattr(roomy, "has_room", lambda: next(answers))
    assert "almost full" in await refusal(roomy, sender)
    assert not list(tmp_path.iterdir())
    size = await write_upload(BatchFolder(tmp_path), "f", Sender(3).read_chunk, bytes_max=BYTES_MAX)
    assert size == (tmp_path / "f").stat().st_size == 3000


async def test_a_full_disk_is_named_as_the_reason(tmp_path: Path) -> None:
    assert "No space left on device" in await refusal(FullDisk(tmp_path), Sender(1))
