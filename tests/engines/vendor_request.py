"""What a server in place of SGLang or TensorRT-LLM takes of its command line and of a request.

Imported by vendor_server.py, and by vendor_engine.py, which has the two legs of a request: `ENGINE`
is the first argument of their process.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

ENGINE, *ARGUMENTS = sys.argv[1:]
VENDOR: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "vendor_fields.json").read_text()
)[ENGINE]
FIELDS: Final[dict[str, Any]] = VENDOR["generated"]
KINDS: Final[dict[str, tuple[type, ...]]] = {
    **{"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)},
    **{"list": (list,), "dict": (dict,), "null": (type(None),), "any": (object,)},
}


class Refusal(Exception):
    """The server answers 400. `is_validation` is true if the body has no valid form."""

    def __init__(self, message: str, *, is_validation: bool = False) -> None:
        super().__init__(message)
        self.is_validation = is_validation


def flag(name: str, default: str = "") -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1] if name in ARGUMENTS else default


LIMIT: Final = int(flag(VENDOR["limit_flag"]))


def check_fields(kind: str, body: Any, place: str = "") -> dict[str, Any]:
    """Return the fields of a request without those that are null, by their first names.

    `place` is where in the request the object is.
    """
    if not isinstance(body, dict):
        raise Refusal(f"{place} Input should be a valid dictionary", is_validation=True)
    known, second = FIELDS["request"][kind], FIELDS["second_names"] if kind == "chat" else {}
    fields = dict(body)
    for name, alias in second.items():
        if alias in fields:
            # pydantic takes the alias, and then the field's own name is one too many.
            if name in fields and FIELDS["forbids_other_fields"]:
                raise Refusal(f"{place}{name}: Extra inputs are not permitted", is_validation=True)
            fields[name] = fields.pop(alias)
    for name, value in fields.items():
        if name in known:
            if not is_of_kind(value, known[name].split("|")):
                raise Refusal(f"{place}{name}: Input should be {known[name]}", is_validation=True)
        elif FIELDS["forbids_other_fields"]:
            raise Refusal(f"{place}{name}: Extra inputs are not permitted", is_validation=True)
    for name in FIELDS["required"][kind]:
        if name not in fields:
            raise Refusal(f"{place}{name}: Field required", is_validation=True)
    return {name: value for name, value in fields.items() if value is not None}


def is_of_kind(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return not {"bool", "any"}.isdisjoint(kinds)
    return any(isinstance(value, KINDS[kind]) for kind in kinds if kind != "bool")


def check_values(fields: dict[str, Any]) -> None:
    if "stream_options" in fields:
        check_fields("stream_options", fields["stream_options"], "stream_options: ")
        if VENDOR["stream_options_need_stream"] and not fields.get("stream"):
            raise Refusal("stream_options can only be set if stream is true", is_validation=True)
    for tool in fields.get("tools", ()):
        function = check_fields("tool", tool, "tools: ")["function"]
        check_fields("function", function, "tools: function: ")
    if fields.get("temperature", 1) < 0 or not 0 <= fields.get("top_p", 1) <= 1:
        raise Refusal("temperature or top_p is out of range")
    if tokens_max(fields) <= 0:
        raise Refusal("`max_tokens` must be greater than 0")
    is_greedy = fields.get("temperature", 1) == 0
    if fields.get("n", 1) > 1 and is_greedy and not VENDOR["greedy_n"]:
        raise Refusal("Greedy decoding in the LLM API does not allow multiple returns.")
    for message in fields.get("messages", ()):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal("messages: Input should be a valid object", is_validation=True)
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") not in VENDOR["content_parts"]:
                is_validation = VENDOR["unknown_part_is_validation"]
                raise Refusal("messages: unknown part of content", is_validation=is_validation)


def tokens_max(fields: dict[str, Any]) -> int:
    return int(fields.get("max_completion_tokens") or fields.get("max_tokens", LIMIT))


def check_length(prompt: list[str]) -> None:
    words = {"prompt": len(prompt), "limit": LIMIT, "left": LIMIT - len(prompt)}
    if len(prompt) >= LIMIT:
        raise Refusal(VENDOR["context_words"].format_map(words))
    step = int(flag(VENDOR["step_flag"], "0")) if "step_flag" in VENDOR else 0
    if 0 < step < len(prompt) and VENDOR["step_flag_off"] not in ARGUMENTS:
        raise Refusal(VENDOR["step_words"].format_map({**words, "limit": step}))


def text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return " ".join(str(part.get("text", part.get("type"))) for part in parts)


def prompts_of(fields: dict[str, Any]) -> list[list[str]]:
    if "messages" in fields:
        messages = fields["messages"]
        is_open = fields.get("continue_final_message") and VENDOR["continues_final_message"]
        turns = [["<turn>", *text_of(one.get("content")).split()] for one in messages]
        prompt = [token for turn in turns for token in turn]
        return [prompt if is_open else [*prompt, "<answer>"]]
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return [prompt.split()]
    if prompt and isinstance(prompt[0], int):
        return [[str(token) for token in prompt]]
    return [p.split() if isinstance(p, str) else [str(token) for token in p] for p in prompt]
