"""Documents that ask for far more memory, time or files than their size suggests."""

import io
import zipfile
from typing import Final

SECRET_ENTITY: Final = '<!DOCTYPE d [<!ENTITY e SYSTEM "file://{path}">]>'
WORD: Final = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET: Final = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELATIONS: Final = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE: Final = "http://schemas.openxmlformats.org/package/2006"
XML: Final = '<?xml version="1.0"?>'


def packed(files: dict[str, str | bytes]) -> bytes:
    """Return a ZIP archive of files."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


def office(kind: str, part: str, content: str | bytes, others: str = "") -> bytes:
    """Return an Office document with one main part of a media type."""
    types = (
        f'{XML}<Types xmlns="{PACKAGE}/content-types"><Default Extension="xml" ContentType='
        f'"application/xml"/><Default Extension="rels" ContentType='
        f'"application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/{part}" ContentType="application/vnd.openxmlformats-officedocument.'
        f'{kind}.main+xml"/>{others}</Types>'
    )
    relations = (
        f'{XML}<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" Type='
        f'"{RELATIONS}/officeDocument" Target="{part}"/></Relationships>'
    )
    return packed({"[Content_Types].xml": types, "_rels/.rels": relations, part: content})


def docx(content: str | bytes) -> bytes:
    """Return a Word document with this main part."""
    return office("wordprocessingml.document", "word/document.xml", content)


def word_text(text: str, head: str = "") -> str:
    """Return the main part of a Word document with one paragraph."""
    body = f"<w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body>"
    return f'{XML}{head}<w:document xmlns:w="{WORD}">{body}</w:document>'


def exponential_entities() -> bytes:
    """Return a Word document with ten levels of entities, each ten times the one before."""
    entities = '<!ENTITY l0 "lol">' + "".join(
        f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 11)
    )
    return docx(word_text("&l10;", f"<!DOCTYPE d [{entities}]>"))


def external_entity(path: str) -> bytes:
    """Return a Word document whose text is a file of the machine that reads it."""
    return docx(word_text("&e;", SECRET_ENTITY.format(path=path)))


def far_cell() -> bytes:
    """Return a sheet with one cell, in the last row and column that a sheet can have."""
    row = '<row r="1048576"><c r="XFD1048576" t="inlineStr"><is><t>x</t></is></c></row>'
    sheet = f'{XML}<worksheet xmlns="{SHEET}"><sheetData>{row}</sheetData></worksheet>'
    book = (
        f'{XML}<workbook xmlns="{SHEET}" xmlns:r="{RELATIONS}"><sheets>'
        '<sheet name="s" sheetId="1" r:id="r1"/></sheets></workbook>'
    )
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.worksheet+xml"
    override = f'<Override PartName="/xl/worksheets/s.xml" ContentType="{kind}"/>'
    document = office("spreadsheetml.sheet", "xl/workbook.xml", book, override)
    target = io.BytesIO(document)
    relations = (
        f'{XML}<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" Type='
        f'"{RELATIONS}/worksheet" Target="worksheets/s.xml"/></Relationships>'
    )
    with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/_rels/workbook.xml.rels", relations)
        archive.writestr("xl/worksheets/s.xml", sheet)
    return target.getvalue()


def nested_html(levels: int) -> bytes:
    """Return a page of elements within elements."""
    return b"<div>" * levels + b"x" + b"</div>" * levels
