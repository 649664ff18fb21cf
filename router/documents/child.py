"""Converts the document on standard input: `python -m router.documents.child EXTENSION [CHARSET]`.

Writes one JSON object: `data` with the Markdown, or `error` with the reason.
"""

import io
import json
import sys
from importlib import import_module
from typing import Final

from isochrone.service.trust.landlock import CannotConfine
from router.documents.charset import TEXTS, text_of
from router.documents.formats import FORMATS
from router.documents.packed_size import TooLarge, check_packed
from router.documents.sandbox import confine

MARKDOWN_CHARACTERS_MAX: Final = 4_000_000


def convert(document: bytes, extension: str, charset: str = "") -> str:
    """Return a document as Markdown. Raises whatever a damaged document provokes."""
    is_text = extension in TEXTS
    if is_text:
        document = text_of(document, extension, charset).encode(errors="replace")
    markitdown = import_module("markitdown")
    converters = import_module("markitdown.converters")
    converter = markitdown.MarkItDown(enable_builtins=False, enable_plugins=False)
    converter.register_converter(getattr(converters, FORMATS[extension].converter)())
    info = markitdown.StreamInfo(
        extension=extension,
        mimetype=FORMATS[extension].media_type,
        charset="utf-8" if is_text else None,
    )
    return str(converter.convert_stream(io.BytesIO(document), stream_info=info).text_content)


def main() -> None:
    """Confine this process, read the document and convert it.

    Parsers of documents raise every kind of exception, so all are caught and reported to the
    client.
    """
    document = sys.stdin.buffer.read()
    answer: dict[str, str]
    try:
        confine()
        check_packed(document, sys.argv[1])
        markdown = convert(document, *sys.argv[1:])
        answer = {"data": markdown}
        if len(markdown) > MARKDOWN_CHARACTERS_MAX:
            answer = {"error": f"its text has more than {MARKDOWN_CHARACTERS_MAX} characters"}
    except CannotConfine as error:
        answer = {"error": f"cannot be read safely here: {error}"}
    except ModuleNotFoundError as error:
        answer = {"error": f"the router lacks {error.name}: install isochrone[documents]"}
    except TooLarge as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": "it needs too much memory"}
    except Exception as error:
        answer = {"error": f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
