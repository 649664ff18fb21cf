"""What packed documents unpack to is known before they are unpacked."""

import io
import zipfile
from functools import cache

import pytest

from router.documents.packed_size import CELLS_MAX, TooLarge, check_packed
from tests import hostile_documents as documents


def a_sheet(cells: str) -> bytes:
    """Return a workbook's archive with one sheet, below any name."""
    text = f'<x:worksheet xmlns:x="{documents.SHEET}"><x:sheetData>{cells}</x:sheetData>'
    return documents.packed({"picture.png": b"\x89PNG", "odd/name": text + "</x:worksheet>"})


@cache
def zeros() -> bytes:
    """Return an archive of 144 MiB of zeros."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(3):
            archive.writestr(f"{number}.xml", bytes(48 << 20))
    return target.getvalue()


def test_a_far_cell_is_refused() -> None:
    with pytest.raises(TooLarge, match=f"more than {CELLS_MAX} cells"):
        check_packed(documents.far_cell(), ".xlsx")


@pytest.mark.parametrize(
    ("cells", "is_refused"),
    [
        ('<x:row r="1300"><x:c r="ALM1300"/></x:row>', True),
        ('<x:row r="1300"><x:c r="ALL1300"/></x:row>', False),
        ('<x:row r="1300000"/><x:row><x:c/></x:row>', True),
        ('<x:row r="1299999"/><x:row><x:c/></x:row>', False),
        ('<x:row><x:c r="B650001"/></x:row>', True),
        ("<x:row><x:c/><x:c/></x:row><x:row><x:c r='1'/></x:row>", False),
        ("<x:row r='x'><x:c r='-'/></x:row>", False),
        ("<x:row r='9999999'>", False),
        ("not closed", False),
    ],
)
def test_the_grid_of_a_sheet(cells: str, *, is_refused: bool) -> None:
    if not is_refused:
        check_packed(a_sheet(cells), ".xlsx")
        return
    with pytest.raises(TooLarge):
        check_packed(a_sheet(cells), ".xlsx")


@pytest.mark.parametrize("extension", [".docx", ".epub", ".pptx", ".xlsx"])
def test_an_archive_of_zeros_is_refused_by_its_stated_size(extension: str) -> None:
    assert len(zeros()) < 1 << 20
    with pytest.raises(TooLarge, match="unpacks to more than 128 MiB"):
        check_packed(zeros(), extension)


def test_what_is_not_packed_is_not_looked_at() -> None:
    check_packed(b"<html>", ".html")
    with pytest.raises(zipfile.BadZipFile):
        check_packed(b"no archive", ".docx")
