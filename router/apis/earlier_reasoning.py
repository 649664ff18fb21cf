"""The reasoning of an earlier answer, as clients send it back and as engines read it. Pure."""

import base64
from typing import Any, Final

FIELDS: Final = ("reasoning_content", "reasoning")
"""Its fields in a message. Engines read the first one. Releases of vLLM after 0.12 read only the
second; 0.32 reads both in chats, and only the second when it counts tokens."""

ENCODED: Final = "encoded:"
"""The prefix of an `encrypted_content` of this service. Other servers' cannot be read."""


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the fields of a message with this reasoning; none if it is empty."""
    return dict.fromkeys(FIELDS, text) if text else {}


def encode_reasoning(text: str) -> str:
    """Return reasoning as an `encrypted_content`, which some clients send back in place of its
    text. The text need not be secret: it is in the same answer.
    """
    return ENCODED + base64.b64encode(text.encode(errors="replace")).decode()


def decode_reasoning(content: Any) -> str:
    """Return the reasoning in an `encrypted_content`, "" if it is not one of ours."""
    if not isinstance(content, str) or not content.startswith(ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(ENCODED), validate=True).decode()
    except ValueError:
        return ""
