"""vLLM holds a call that it must make to the schema of the tool, by what our agent sends.

vLLM's own code computes the constraint, for each parser that the agent chooses. That an engine then
keeps to it is in the conformance suite, with one of these parsers.
"""

import json
import subprocess
from typing import Any, Final

import msgspec
import pytest

from nodeagent.drivers import DRIVERS
from nodeagent.drivers.output_parsers import FORMATS
from nodeagent.drivers.request_body import with_fields
from tests.engines.real_engines import VLLM_COMMANDS, needs_vllm
from tests.engines.test_vllm_options import a_launch

VALUE: Final = "zq-7"
SCHEMA: Final = {"type": "object", "properties": {"code": {"enum": [VALUE]}}, "required": ["code"]}
NAMED: Final = {"type": "function", "function": {"name": "f"}}
GRAMMARS_OF_ITS_OWN: Final = {"mistral", "kimi_k3"}
"""Parsers whose constraint is not of this kind."""

SCRIPT: Final = """
import json, sys
import vllm.parser.harmony
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
from vllm.tool_parsers.utils import get_json_schema_from_tools

def constraint(name, body):
    parser = ToolParserManager.get_tool_parser(name)
    request = ChatCompletionRequest(**body)
    given = {"tools": request.tools, "tool_choice": request.tool_choice}
    if parser.structural_tag_model:
        tag = get_model_structural_tag(model=parser.structural_tag_model, reasoning=False, **given)
        return json.dumps(tag.model_dump())
    return json.dumps(parser.supports_required_and_named and get_json_schema_from_tools(**given))

print(json.dumps([constraint(*case) for case in json.load(sys.stdin)]))
"""


def a_body(choice: Any, *, is_sent: bool = True) -> Any:
    function = {"name": "f", "parameters": SCHEMA}
    body = {"model": "m", "messages": [], "tool_choice": choice}
    data = msgspec.json.encode(body | {"tools": [{"type": "function", "function": function}]})
    command = DRIVERS["vllm"].command(a_launch())
    return msgspec.json.decode(with_fields(data, {}, command) if is_sent else data)


@needs_vllm
@pytest.mark.timeout(600)
def test_the_schema_is_in_what_constrains_a_required_call() -> None:
    names = sorted({form.vllm.tools for form in FORMATS if form.vllm.tools} - GRAMMARS_OF_ITS_OWN)
    cases = [(name, a_body(choice)) for name in names for choice in ("required", NAMED)]
    cases.append(("hermes", a_body("required", is_sent=False)))
    done = subprocess.run(
        [VLLM_COMMANDS / "python", "-c", SCRIPT],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *sent, unchanged = json.loads(done.stdout.splitlines()[-1])
    free = [name for (name, _), text in zip(cases, sent, strict=False) if VALUE not in text]
    assert free == []
    assert VALUE not in unchanged, "vLLM enforces it without `strict`: the agent need not mark it"
