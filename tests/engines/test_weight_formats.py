"""Checkpoints that the real vLLM loads on a CPU, beside the bf16 folder of the other tests.

CI leaves these out, because each engine starts for 40 s: `pytest tests/engines` runs them.
"""

import os
from pathlib import Path
from typing import Final

import pytest

from nodeagent.drivers.driver import COMPLETIONS_PATH
from tests.engines.conftest import a_chat_spec
from tests.engines.quantised_model import CONFIGS, write_quantised
from tests.engines.real_engines import (
    MODEL,
    VLLM_COMMANDS,
    ask,
    needs_vllm,
    running_engine,
    user,
)

THINKING: Final = (
    "{# <tool_call> #}{% if add_generation_prompt %}{% if enable_thinking is defined and"
    " enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put vLLM on the PATH."""
    monkeypatch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")


def reasoning(folder: Path) -> Path:
    """Let a model reason as Qwen3 does: by its chat template and two tokens of its vocabulary."""
    template, tokenizer = folder / "chat_template.jinja", folder / "tokenizer.json"
    words = tokenizer.read_text().replace('"<repo_name>"', '"<think>"')
    texts = {
        template: template.read_text() + THINKING,
        tokenizer: words.replace('"<reponame>"', '"</think>"'),
    }
    for path, text in texts.items():
        path.unlink()
        path.write_text(text)
    return folder


@pytest.mark.parametrize("method", CONFIGS)
async def test_a_model_with_packed_weights_answers(method: str, tmp_path: Path) -> None:
    """And its reasoning is apart from its answer, by the parser that the driver chose."""
    folder = reasoning(write_quantised(MODEL, tmp_path / method, method))
    question = user("What is the capital of France?")
    async with running_engine(a_chat_spec("vllm"), folder, tmp_path / "engine") as engine:
        arguments = engine.record.command.arguments
        assert arguments[arguments.index("--reasoning-parser") + 1] == "qwen3"
        prompt = await ask(engine, path=COMPLETIONS_PATH, prompt="The capital of France is")
        thought = await ask(engine, messages=question, min_tokens=4)
        kwargs = {"enable_thinking": False}
        direct = await ask(engine, messages=question, chat_template_kwargs=kwargs)
    assert "Paris" in prompt.text
    (choice,) = thought.body["choices"]
    assert choice["message"]["reasoning"], choice
    assert not choice["message"]["content"], choice
    assert direct.status == 200, direct.body
    assert not direct.body["choices"][0]["message"]["reasoning"], direct.body


async def test_a_model_without_a_chat_template_is_healthy(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for path in MODEL.iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path)
    async with running_engine(a_chat_spec("vllm"), folder, tmp_path / "engine") as engine:
        chat = await ask(engine, messages=user("Hello"))
        assert chat.status == 400, chat.body
        assert await engine.canary("chat"), engine.canary_problem
        prompt = await ask(engine, path=COMPLETIONS_PATH, prompt="The capital of France is")
    assert "Paris" in prompt.text
