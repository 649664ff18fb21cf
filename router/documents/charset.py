"""Reads documents of text, which may be in any charset.

The charset is the one that a byte order mark, the content-type or the document names. Other text is
UTF-8, or Windows-1252 if it is not valid UTF-8. Nothing is guessed from the frequency of bytes,
which reads "déjà vu" in Latin-1 as "déją vu".
"""

import codecs
import re
from typing import Final

TEXTS: Final = frozenset({".csv", ".htm", ".html", ".ipynb", ".json", ".md", ".txt", ".xml"})
MARKUP: Final = frozenset({".htm", ".html", ".xml"})
DECLARED_WITHIN_BYTES: Final = 1024
"""Browsers look no further, either."""

_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED: Final = re.compile(
    rb"""<(?:\?xml|meta)\s[^>]*?(?:encoding|charset)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)
_WINDOWS: Final = "cp1252"
_MEANS_WINDOWS: Final = frozenset({"ascii", "iso8859-1"})
"""As in browsers: text that claims these has quotation marks and dashes of Windows-1252."""


def text_of(document: bytes, extension: str, charset: str) -> str:
    """Return the text of a document. `charset` is the content-type's, "" if it names none.

    Bytes that the charset does not have become U+FFFD. Raises LookupError for an unknown `charset`.
    """
    for mark, name in _MARKS:
        if document.startswith(mark):
            return document[len(mark) :].decode(name, "replace")
    if name := charset or (_declared(document) if extension in MARKUP else ""):
        known = codecs.lookup(name).name
        return document.decode(_WINDOWS if known in _MEANS_WINDOWS else known, "replace")
    try:
        return document.decode()
    except UnicodeDecodeError:
        return document.decode(_WINDOWS, "replace")


def _declared(document: bytes) -> str:
    """Return the charset that a document of markup names, or "" if it is not a usable one."""
    found = _DECLARED.search(document[:DECLARED_WITHIN_BYTES])
    name = found[1].decode() if found else ""
    # A name that can be read as ASCII is not that of UTF-16.
    is_usable = name and not name.lower().startswith(("utf-16", "utf-32"))
    try:
        return codecs.lookup(name).name if is_usable else ""
    except LookupError:
        return ""
