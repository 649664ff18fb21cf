"""What a chat completion says, as a response. Pure.

Field names are those of OpenAI's API reference, "The response object".
"""

from typing import Any, Final

import msgspec

from router.apis.responses.translate import Format, Reasoning, Wish

_FINISHED: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer that is not whole is not, by its finish reason."""


def opened(wish: Wish, response_id: str, created_at: int) -> dict[str, Any]:
    """Return the response as it is before anything was said."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wish.instructions,
        "max_output_tokens": wish.max_output_tokens,
        "metadata": wish.metadata or {},
        "model": wish.model,
        "output": [],
        "parallel_tool_calls": wish.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": wish.reasoning or Reasoning(),
        "store": False,
        "temperature": 1.0 if wish.temperature is None else wish.temperature,
        "text": {"format": _format_told(wish)},
        "tool_choice": wish.tool_choice or "auto",
        "tools": wish.tools or [],
        "top_p": 1.0 if wish.top_p is None else wish.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": wish.user,
    }


def whole(response: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Return the response that a whole chat completion amounts to."""
    answer: dict[str, Any] = msgspec.json.decode(body)
    choice = (answer.get("choices") or [{}])[0]
    said = choice.get("message") or {}
    response_id = response["id"]
    output: list[dict[str, Any]] = []
    if said.get("reasoning_content"):
        output.append(reasoning_item(response_id, len(output), said["reasoning_content"]))
    if said.get("content"):
        output.append(message_item(response_id, len(output), said["content"]))
    for call in said.get("tool_calls") or []:
        function = call.get("function") or {}
        told = (call.get("id") or "", function.get("name") or "", function.get("arguments") or "")
        output.append(call_item(response_id, len(output), *told))
    return ended(response, output, choice.get("finish_reason"), answer.get("usage"))


def ended(
    response: dict[str, Any], output: list[dict[str, Any]], finish_reason: str | None, usage: Any
) -> dict[str, Any]:
    """Return the response with what was said."""
    lacking = _FINISHED.get(finish_reason or "")
    return {
        **response,
        "status": "incomplete" if lacking else "completed",
        "incomplete_details": {"reason": lacking} if lacking else None,
        "output": output,
        "usage": _usage(usage),
    }


def message_item(response_id: str, at: int, text: str | None) -> dict[str, Any]:
    """Return what the model said as an item of the output; None where it only begins."""
    return {
        "id": f"msg_{response_id}_{at}",
        "type": "message",
        "status": "in_progress" if text is None else "completed",
        "role": "assistant",
        "content": [] if text is None else [text_part(text)],
    }


def reasoning_item(response_id: str, at: int, text: str | None) -> dict[str, Any]:
    """Return what the model thought as an item of the output; None where it only begins."""
    return {
        "id": f"rs_{response_id}_{at}",
        "type": "reasoning",
        "status": "in_progress" if text is None else "completed",
        "summary": [],
        "content": [] if text is None else [reasoning_part(text)],
    }


def call_item(
    response_id: str, at: int, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Return a call of a function as an item of the output."""
    return {
        "id": f"fc_{response_id}_{at}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def text_part(text: str) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Any]:
    """Return the content of what was thought."""
    return {"type": "reasoning_text", "text": text}


def _format_told(wish: Wish) -> Any:
    """Return the format asked for; a name and a schema belong to one kind alone."""
    wanted = (wish.text and wish.text.format) or Format()
    return wanted if wanted.type == "json_schema" else {"type": wanted.type}


def _usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + output,
    }
