"""Arranges the messages of a chat as chat templates of models expect them. Pure.

Many templates accept one system message, at the beginning: of others they raise an error, or leave
them out. Some require that user and assistant take turns, and few know the role `developer`.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, Final

from router.apis.earlier_reasoning import FIELDS as REASONING_FIELDS

BETWEEN_TEXTS: Final = "\n"
SYSTEM_ROLES: Final = ("system", "developer")

Content = str | list[dict[str, Any]]


def arranged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with one system message, at the beginning, and one message a turn."""
    turns: list[dict[str, Any]] = []
    for role, following in groupby(system_first(messages), key=itemgetter("role")):
        turns += _combined(role, list(following))
    return turns


def system_first(
    messages: Sequence[dict[str, Any]], later_role: str = "user"
) -> list[dict[str, Any]]:
    """Return the messages with those of system and developer at the beginning joined to one.

    Later ones get the role `later_role` where they are: the beginning of a prompt stays as it was,
    so that it is in the prefix cache.
    """
    leading = list(takewhile(_is_system, messages))
    later = [
        {**message, "role": later_role} if _is_system(message) else message
        for message in messages[len(leading) :]
    ]
    if not leading:
        return later
    content = _joined([message["content"] for message in leading])
    return [{**leading[0], "role": "system", "content": content}, *later]


def _is_system(message: dict[str, Any]) -> bool:
    return message["role"] in SYSTEM_ROLES


def _combined(role: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of one role that follow each other: one for the user or the assistant."""
    if role not in ("user", "assistant") or len(messages) == 1:
        return messages
    combined = dict(messages[0])
    if contents := [content for message in messages if (content := message["content"])]:
        combined["content"] = _joined(contents)
    for name in REASONING_FIELDS:
        if texts := [text for message in messages if (text := message.get(name))]:
            combined[name] = BETWEEN_TEXTS.join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        combined["tool_calls"] = calls
    return [combined]


def _joined(contents: list[Content]) -> Content:
    """Return the contents of messages as one: texts are joined up to the first with images."""
    texts: list[str] = []
    for content in contents:
        if not isinstance(content, str):
            break
        texts.append(content)
    joined = BETWEEN_TEXTS.join(texts)
    if len(texts) == len(contents):
        return joined
    parts = content_parts(joined) if texts else []
    return parts + [part for content in contents[len(texts) :] for part in content_parts(content)]


def content_parts(content: Content) -> list[dict[str, Any]]:
    """Return the content of a message as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
