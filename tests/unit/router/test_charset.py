"""In which charset a document of text is read."""

import codecs

import pytest

from router.documents.charset import text_of

SHORT = "déjà vu à Noël"
QUOTED = "“déjà vu” – 5 €"


@pytest.mark.parametrize(
    ("extension", "document", "charset", "text"),
    [
        (".txt", SHORT.encode(), "", SHORT),
        (".txt", SHORT.encode("latin-1"), "", SHORT),
        (".csv", "é à ü".encode("latin-1"), "", "é à ü"),
        (".txt", QUOTED.encode("cp1252"), "", QUOTED),
        (".txt", QUOTED.encode("cp1252"), "ISO-8859-1", QUOTED),
        (".txt", "日本語".encode("shift_jis"), "Shift_JIS", "日本語"),
        (".txt", b"a\xffb", "utf-8", "a\ufffdb"),
        (".txt", b"a\x81b", "", "a\ufffdb"),
        (".txt", SHORT.encode("utf-16"), "", SHORT),
        (".txt", codecs.BOM_UTF16_BE + SHORT.encode("utf-16-be"), "", SHORT),
        # A mark is more certain than a name: tools add "charset=utf-8" to all that they send.
        (".csv", SHORT.encode("utf-16"), "utf-8", SHORT),
        (".csv", SHORT.encode("utf-8-sig"), "", SHORT),
        (".txt", b'<meta charset="koi8-r">\xc1', "", '<meta charset="koi8-r">Á'),
        (".html", b'<meta charset="koi8-r">\xc1', "", '<meta charset="koi8-r">а'),
        (".html", b"<meta charset=koi8-r>\xc3\xa9", "utf-8", "<meta charset=koi8-r>é"),
        (".html", b"<meta charset=utf-16>\xc3\xa9", "", "<meta charset=utf-16>é"),
        (".html", b"<meta charset=martian>\xe9", "", "<meta charset=martian>é"),
        (
            ".htm",
            b'<meta http-equiv="content-type" content="text/html; charset=koi8-r">\xc1',
            "",
            '<meta http-equiv="content-type" content="text/html; charset=koi8-r">а',
        ),
        (
            ".xml",
            b"<?xml version='1.0' encoding='koi8-r'?>\xc1",
            "",
            "<?xml version='1.0' encoding='koi8-r'?>а",
        ),
        (".txt", b"", "", ""),
    ],
)
def test_text_is_read_in_the_charset_that_is_named_or_likely(
    extension: str, document: bytes, charset: str, text: str
) -> None:
    assert text_of(document, extension, charset) == text


@pytest.mark.parametrize("charset", ["martian", "zlib"])
def test_an_unknown_charset_is_an_error(charset: str) -> None:
    with pytest.raises(LookupError):
        text_of(b"x", ".txt", charset)
