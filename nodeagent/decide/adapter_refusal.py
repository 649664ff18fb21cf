"""Decides whether an engine that did not load a LoRA adapter refuses it, or only failed at it.

Rule 1: an answer of 400 to 499 is a refusal. The adapter would be refused by every such engine.
Rule 2: vLLM answers 500 in both cases. If its message says that the engine core ran the call, the
contents of the adapter are at fault, because its files have been verified; unless memory or disk
ran out.
"""

from typing import Final

CALL_FAILED: Final = "Call to add_lora method failed: "
"""The beginning of a message of vLLM's engine core; the reason follows."""

EXHAUSTED: Final = (
    *("out of memory", "outofmemory", "cannot allocate", "can't allocate"),
    *("not enough memory", "no space left", "no free", "too many open files"),
)
"""Parts of messages about the engine or its machine, in lower case."""

REASON_CHARS_MAX: Final = 300


def refusal_reason(status: int, message: str) -> str:
    """Return why an engine refuses an adapter; "" if it failed for another reason.

    `message` is that of the engine's error answer, "" if it had none.
    """
    if 400 <= status < 500:
        return message[:REASON_CHARS_MAX] or f"the engine answered {status}"
    if not message.startswith(CALL_FAILED):
        return ""
    reason = message.removeprefix(CALL_FAILED)
    if any(words in reason.lower() for words in EXHAUSTED):
        return ""
    return reason[:REASON_CHARS_MAX]
