"""Chooses how an engine finds tool calls and reasoning in a model's output.

vLLM and SGLang have a parser for each format, and do not choose one by themselves. The chat
template shows the format that a model learned: the marks that it writes around earlier calls.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A chat template has up to 30 kB; a tokenizer_config.json with many added tokens up to 3 MB."""
THINKING_SWITCH: Final = "enable_thinking"
GENERATION_PROMPT: Final = "add_generation_prompt"
TOOLS_OPTION: Final = "tool_call_parser"
REASONING_OPTION: Final = "reasoning_parser"
AUTO_TOOLS_FLAG: Final = "enable_auto_tool_choice"
DEFAULT_TOOLS: Final = "hermes"
TOOLS_VARIABLE: Final = "tools"
"""The name of a request's tools in chat templates."""


STRICT_PARSERS: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset(
        (
            *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
            *("glm45", "glm47", "hermes", "hy_v4", "kimi_k2", "kimi_k3", "ling3", "llama3_json"),
            *("llama4_json", "longcat", "mimo", "minimax_m2", "openai", "plamo3", "qwen3_coder"),
            *("qwen3_json", "qwen3_xml", "step3p5", "step5"),
        )
    ),
    "sglang": frozenset(
        (
            *("apertus2509", "beam", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4"),
            *("deepseekv41", "glm47", "gpt-oss", "hermes", "inkling", "interns1", "kimi_k2"),
            *("kimi_k3", "llama3", "mistral", "nanbeige", "qwen", "qwen25", "qwen3_coder"),
            *("step3p5", "trinity"),
        )
    ),
}
"""The parsers with which calls of `strict` functions follow their schemas, although the model
chooses whether to call: those with a structural tag in vLLM 0.32 and 0.33, and in SGLang 0.5.23."""


class OutputParsers(msgspec.Struct, frozen=True):
    """The names of an engine's parsers; "" where it has none for the model, or needs none."""

    tools: str = ""
    reasoning: str = ""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A way of writing tool calls and reasoning, and the parsers for it.

    A model has it if its chat template has all `marks` and, where one is given, it is of type
    `model_type`. `reasons` is what its template has besides, if the model reasons; THINKING_SWITCH
    stands for any template that lets the caller choose or that begins each answer with `<think>`.
    """

    marks: tuple[str, ...] = ()
    model_type: str = ""
    vllm: OutputParsers
    sglang: OutputParsers
    tensorrt_llm: OutputParsers = OutputParsers()
    reasons: str = THINKING_SWITCH


FORMATS: Final = (
    OutputFormat(
        model_type="gpt_oss",
        vllm=OutputParsers("openai", "openai_gptoss"),
        sglang=OutputParsers("gpt-oss", "gpt-oss"),
        reasons="",
    ),
    # Their engines write prompts without a chat template, vLLM also where there is one (V3.2-Exp).
    OutputFormat(
        model_type="deepseek_v32",
        marks=("<｜tool▁calls▁begin｜>",),
        vllm=OutputParsers("deepseek_v32", "deepseek_v3"),
        sglang=OutputParsers("deepseekv31", "deepseek-v3"),
        reasons="thinking",
    ),
    OutputFormat(
        model_type="deepseek_v32",
        vllm=OutputParsers("deepseek_v32", "deepseek_v3"),
        sglang=OutputParsers("deepseekv32", "deepseek-v3"),
        tensorrt_llm=OutputParsers("deepseek_v32"),
        reasons="",
    ),
    OutputFormat(
        model_type="deepseek_v4",
        vllm=OutputParsers("deepseek_v4", "deepseek_v4"),
        sglang=OutputParsers("deepseekv4", "deepseek-v4"),
        reasons="",
    ),
    OutputFormat(
        model_type="kimi_k3",
        vllm=OutputParsers("kimi_k3", "kimi_k3"),
        sglang=OutputParsers("kimi_k3", "kimi_k3"),
        reasons="",
    ),
    OutputFormat(
        model_type="llama4",
        vllm=OutputParsers("llama4_pythonic"),
        sglang=OutputParsers("pythonic"),
    ),
    # DeepSeek V3 and R1 write the arguments in a block of Markdown, V3.1 does not.
    OutputFormat(
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        vllm=OutputParsers("deepseek_v3", "deepseek_r1"),
        sglang=OutputParsers("deepseekv3", "deepseek-r1"),
        tensorrt_llm=OutputParsers("deepseekv3"),
    ),
    OutputFormat(
        marks=("<｜tool▁calls▁begin｜>",),
        vllm=OutputParsers("deepseek_v31", "deepseek_v3"),
        sglang=OutputParsers("deepseekv31", "deepseek-v3"),
        tensorrt_llm=OutputParsers("deepseekv3.1"),
        reasons="thinking",
    ),
    OutputFormat(
        marks=("<|tool_calls_section_begin|>",),
        vllm=OutputParsers("kimi_k2", "kimi_k2"),
        sglang=OutputParsers("kimi_k2", "kimi_k2"),
        tensorrt_llm=OutputParsers("kimi_k2"),
        reasons="reasoning_content",
    ),
    OutputFormat(
        marks=("<minimax:tool_call>",),
        vllm=OutputParsers("minimax_m2", "minimax_m2"),
        sglang=OutputParsers("minimax-m2", "minimax"),
    ),
    OutputFormat(
        marks=("<seed:tool_call>",),
        vllm=OutputParsers("seed_oss", "seed_oss"),
        sglang=OutputParsers(),
        reasons="<seed:think>",
    ),
    # GLM 4.7 and later write no newline after the name, for which SGLang has another parser.
    OutputFormat(
        marks=("<tool_call>{function-name}<arg_key>",),
        vllm=OutputParsers("glm45", "glm45"),
        sglang=OutputParsers("glm47", "glm45"),
    ),
    OutputFormat(
        marks=("<arg_key>",),
        vllm=OutputParsers("glm45", "glm45"),
        sglang=OutputParsers("glm45", "glm45"),
    ),
    # Qwen3-Coder
    OutputFormat(
        marks=("<function=", "<parameter="),
        vllm=OutputParsers("qwen3_coder", "qwen3"),
        sglang=OutputParsers("qwen3_coder", "qwen3"),
        tensorrt_llm=OutputParsers("qwen3_coder"),
    ),
    # Hermes, Qwen2.5 and Qwen3
    OutputFormat(
        marks=("<tool_call>",),
        vllm=OutputParsers("hermes", "qwen3"),
        sglang=OutputParsers("qwen", "qwen3"),
        tensorrt_llm=OutputParsers("qwen3"),
    ),
    OutputFormat(
        marks=("[TOOL_CALLS]",),
        vllm=OutputParsers("mistral", "mistral"),
        sglang=OutputParsers("mistral", "mistral"),
        reasons="[THINK]",
    ),
    # Llama 3.1 and later
    OutputFormat(
        marks=("<|start_header_id|>", "ipython"),
        vllm=OutputParsers("llama3_json"),
        sglang=OutputParsers("llama3"),
    ),
    # A distilled DeepSeek R1 whose template knows no tools.
    OutputFormat(
        marks=("<think>",),
        vllm=OutputParsers("", "deepseek_r1"),
        sglang=OutputParsers("", "deepseek-r1"),
    ),
)
"""The first one that fits a model counts. The names are those of vLLM 0.32 and 0.33, SGLang 0.5.23
and TensorRT-LLM 1.2."""


def with_parsers(engine: str, options: Mapping[str, str], model_path: Path) -> dict[str, str]:
    """Return a deployment's options with the parsers for its model, where they name none. Blocks.

    Without a parser vLLM refuses every request with tools. A model that has learned no tools gets
    one, too: vLLM makes it call a required or named tool, and the parser reads that call.
    `none` as the name of a parser, or `enable_auto_tool_choice=false`, turns it off.
    """
    chosen = output_parsers(engine, model_path)
    if engine == "vllm" and not chosen.tools and _knows_no_tools(model_path):
        chosen = msgspec.structs.replace(chosen, tools=DEFAULT_TOOLS)
    parsers = {
        TOOLS_OPTION: options.get(TOOLS_OPTION, chosen.tools),
        REASONING_OPTION: options.get(REASONING_OPTION, chosen.reasoning),
    }
    named = {option: name for option, name in parsers.items() if name.lower() not in ("", "none")}
    others = {name: value for name, value in options.items() if name not in parsers}
    if engine == "vllm" and TOOLS_OPTION in named:
        # vLLM ignores its parser without this flag, and answers 400 to tool_choice "auto".
        others.setdefault(AUTO_TOOLS_FLAG, "true")
    return {**others, **named}


def may_be_strict(engine: str, options: Mapping[str, str]) -> bool:
    """Return whether calls of `strict` functions follow their schemas with these options.

    Without a parser the engine refuses requests with tools itself.
    """
    parser = options.get(TOOLS_OPTION, "")
    return not parser or parser in STRICT_PARSERS[engine]


def output_parsers(engine: str, model_path: Path) -> OutputParsers:
    """Return the parsers of "vllm", "sglang" or "tensorrt_llm" for the model in a folder.

    Return none for a model whose template shows no tool calls and no reasoning, and for a folder
    without a config.json or a chat template, such as one with a GGUF file. Blocks.
    """
    model_type = _field(model_path / "config.json", "model_type")
    template = _template(model_path)
    for form in FORMATS:
        has_marks = all(mark in template for mark in form.marks)
        if has_marks and form.model_type in ("", model_type):
            parsers: OutputParsers = getattr(form, engine)
            reasons = _reasons(template, form.reasons)
            return OutputParsers(parsers.tools, parsers.reasoning if reasons else "")
    return OutputParsers()


def _knows_no_tools(model_path: Path) -> bool:
    """Return whether a model has a chat template without tools.

    One with tools in a format that is not listed gets no parser: the wrong one would leave its
    calls in the text of answers.
    """
    template = _template(model_path)
    return bool(template) and TOOLS_VARIABLE not in template


def _template(model_path: Path) -> str:
    """Return a model's chat template, "" if it has none."""
    return _read(model_path / "chat_template.jinja") or _field(
        model_path / "tokenizer_config.json", "chat_template"
    )


def _reasons(template: str, mark: str) -> bool:
    """Return whether the answers of a model with this template begin with reasoning."""
    if mark != THINKING_SWITCH:
        return mark in template
    begins_with_think = "<think>" in template.rpartition(GENERATION_PROMPT)[2]
    return THINKING_SWITCH in template or begins_with_think


def _field(path: Path, name: str) -> str:
    """Return a text field of a JSON object in a file, "" if there is none."""
    try:
        value = msgspec.json.decode(_read(path) or "{}", type=dict[str, msgspec.Raw]).get(name)
        return msgspec.json.decode(value, type=str) if value is not None else ""
    except msgspec.DecodeError:
        return ""


def _read(path: Path) -> str:
    """Return a file's text, "" if there is none or if it is too long to be the right one."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError:
        return ""
    return text.decode(errors="replace") if len(text) <= FILE_BYTES_MAX else ""
