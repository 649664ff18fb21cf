"""Tools, calls and results as plain text, for chat templates that do not mention tools."""

import json
from typing import Any

from nodeagent.engine.chat.call_format import ToolCallFormat


def messages_as_text(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], call_format: ToolCallFormat
) -> list[dict[str, Any]]:
    """Return `messages` with calls and results as text and `tools` in the system message."""
    plain = [_message_as_text(message, call_format) for message in messages]
    if tools:
        instructions = _instructions(tools, call_format)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _message_as_text(message: dict[str, Any], call_format: ToolCallFormat) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = call_format.separator.join(
        json.dumps(
            {
                "name": call["function"]["name"],
                call_format.arguments_key: call["function"]["arguments"],
            },
            ensure_ascii=False,
        )
        for call in calls
    )
    content = f"{message['content']}\n" if message["content"] else ""
    return {
        "role": message["role"],
        "content": f"{content}{call_format.start}{written}{call_format.end}",
    }


def _instructions(tools: list[dict[str, Any]], call_format: ToolCallFormat) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = f'{{"name": <function name>, "{call_format.arguments_key}": <object of arguments>}}'
    return (
        "You may call functions to help with the user's query. These are their signatures:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        "To call a function, answer with its name and arguments in this form, and nothing else:\n"
        f"{call_format.start}{example}{call_format.end}"
    )
