"""The kinds of documents that can be converted, by the extension of their names."""

from typing import Final, NamedTuple


class DocumentFormat(NamedTuple):
    """The media type of a format, and the converter of the package `markitdown` for it."""

    media_type: str
    converter: str


_OFFICE: Final = "application/vnd.openxmlformats-officedocument"
FORMATS: Final[dict[str, DocumentFormat]] = {
    ".csv": DocumentFormat("text/csv", "CsvConverter"),
    ".docx": DocumentFormat(f"{_OFFICE}.wordprocessingml.document", "DocxConverter"),
    ".epub": DocumentFormat("application/epub+zip", "EpubConverter"),
    ".htm": DocumentFormat("text/html", "HtmlConverter"),
    ".html": DocumentFormat("text/html", "HtmlConverter"),
    ".ipynb": DocumentFormat("application/x-ipynb+json", "IpynbConverter"),
    ".json": DocumentFormat("application/json", "PlainTextConverter"),
    ".md": DocumentFormat("text/markdown", "PlainTextConverter"),
    ".pdf": DocumentFormat("application/pdf", "PdfConverter"),
    ".pptx": DocumentFormat(f"{_OFFICE}.presentationml.presentation", "PptxConverter"),
    ".txt": DocumentFormat("text/plain", "PlainTextConverter"),
    ".xlsx": DocumentFormat(f"{_OFFICE}.spreadsheetml.sheet", "XlsxConverter"),
    ".xml": DocumentFormat("text/xml", "PlainTextConverter"),
}
"""Left out are formats whose converters call programs or services, and archives of documents."""
