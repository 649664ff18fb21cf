"""Which line of an engine's log an operator sees as the reason of its end."""

import logging
from pathlib import Path
from typing import Final

import pytest

from isochrone.service.logs import JsonLineFormatter
from nodeagent.host.engines.engine_log import NO_CAUSE, last_error

ULIMIT: Final = (
    "(APIServer pid=2) WARNING 11-23 16:54:03 [system_utils.py:255] Found ulimit of 20000 and"
    " failed to automatically increase with error current limit exceeds error: maximum limit."
)
DIED: Final = "(APIServer pid=2) ERROR 11-23 [core_client.py:1] Engine core died unexpectedly."
WEIGHTS: Final = "(Worker pid=3) ERROR 11-23 [executor.py:953] ValueError: no weights for layer 30"
WORKER: Final = (
    "(EngineCore pid=6) ERROR 11-30 15:04:19 [multiproc_executor.py:315] Worker proc VllmWorker-0"
    " died unexpectedly (exit code: None), shutting down executor."
)
EXECUTOR: Final = "RuntimeError: Executor failed."
CORE: Final = "RuntimeError: Engine core initialization failed. See root cause above."
PYDANTIC: Final = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
HUB: Final = "  Value error, Invalid repository ID or local directory specified: '/m'"
TOKENIZER: Final = "ValueError: Couldn't instantiate the backend tokenizer from one of:"
INFO: Final = "(APIServer pid=2) INFO:     Application shutdown complete."

ACCESS: Final = 'INFO:     127.0.0.1:42288 - "GET /metrics HTTP/1.1" 200 OK'
FAILED: Final = ACCESS.replace("200 OK", "500 Internal Server Error")
READY: Final = '{"at":"2026-11-28T08:49:55+0000","level":"info","message":"ready","load_s":7.3}'
FAULT: Final = '{"at":"2026-11-28T08:50:01+0000","level":"error","message":"error: bad"}'

LLAMA: Final = "0.00.123.456"
NO_TENSOR: Final = f"{LLAMA} E llama_model_load: error loading model: missing tensor 'output'"
NOT_LOADED: Final = f"{LLAMA} E llama_model_load_from_file_impl: failed to load model"
EXITING: Final = f"{LLAMA} E srv  llama_server: exiting due to model loading error"
RELEASED: Final = "1.02.123.456 I slot      release: id  3 | task 4 | stop processing: n_tokens = 9"
TOO_LONG: Final = (
    f"{LLAMA} E srv    send_error: task id = 7, error: request (5007 tokens) exceeds the available"
    " context size (2048 tokens), try increasing it"
)
GOT: Final = f"{LLAMA} W srv    operator(): got exception: fatal: x"
BIND: Final = f"{LLAMA} E srv         start: couldn't bind HTTP server socket"
NO_CONTEXT: Final = f"{LLAMA} E srv    load_model: failed to create_context with model 'm.gguf'"
FLASH: Final = (
    f"{LLAMA} E llama_init_from_model: quantized V cache requires flash_attn to be enabled"
)
ASSERTED: Final = "/src/llama-kv-cache.cpp:9: GGML_ASSERT(n > 0) failed"
FRAME: Final = "/opt/llama/llama-server(+0x5a0a6b)[0x55]"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([ULIMIT, "loading", DIED, INFO], DIED + NO_CAUSE),
        ([ULIMIT, WEIGHTS, CORE, INFO], WEIGHTS),
        ([ULIMIT, CORE, INFO], CORE + NO_CAUSE),
        ([ULIMIT, WORKER, EXECUTOR, DIED.replace("died", "failed"), INFO], WORKER + NO_CAUSE),
        ([WEIGHTS, WORKER, EXECUTOR, INFO], WEIGHTS),
        ([ULIMIT, INFO], INFO),
        ([ULIMIT, PYDANTIC, HUB], f"{PYDANTIC} {HUB.strip()}"),
        ([TOKENIZER, "(1) a library,", "(2) a slow one", INFO, "x", "y"],
         f"{TOKENIZER} (1) a library, (2) a slow one {INFO}"),
        (["\x1b[31mKeyError: 'lm_head'\x1b[0m"], "KeyError: 'lm_head'"),
        (["", "  "], ""),
        ([READY], ""),
        ([READY, "killed"], "killed"),
        ([READY, FAULT, READY], "error: bad"),
        ([FAULT.replace("error: bad", "bad"), READY], "bad"),
        (["\tslow\tstart"], "slow start"),
        ([INFO, ACCESS], ""),
        ([WEIGHTS, ACCESS], WEIGHTS),
        ([ACCESS, FAILED], FAILED),
        ([NO_TENSOR, NOT_LOADED, EXITING], NO_TENSOR),
        ([RELEASED], ""),
        ([TOO_LONG, GOT, RELEASED], ""),
        ([RELEASED, TOO_LONG], ""),
        ([BIND, EXITING], BIND),
        ([FLASH, NO_CONTEXT, EXITING], FLASH),
        ([NOT_LOADED, EXITING], EXITING),
        ([RELEASED, ASSERTED, FRAME, FRAME], ASSERTED),
    ],
    ids=["killed", "first hand", "second hand", "worker killed",
         "worker failed", "silent", "pydantic", "colon", "colours", "none",
         "own line", "after it", "own error", "own words", "tabs",
         "served", "served after it", "failed request",
         "llama.cpp", "its release", "its refusal", "its last refusal", "its port", "its option",
         "its silence", "its abort"],
)  # fmt: skip
def test_the_line_that_says_why_is_found(tmp_path: Path, lines: list[str], reason: str) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"{line}\n" for line in lines))
    assert last_error(log) == reason


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_the_error_of_the_embedded_engine_is_quoted_not_the_start_of_its_traceback(
    tmp_path: Path, error: Exception
) -> None:
    """A line of JSON with a traceback was cut long before its error, so nothing said why."""

    def fail(depth: int) -> None:
        if not depth:
            raise error
        fail(depth - 1)

    try:
        fail(5)
    except (RuntimeError, MemoryError) as raised:
        caught = (type(raised), raised, raised.__traceback__)
    record = logging.LogRecord("step", logging.ERROR, "", 1, "the step thread died", (), caught)
    log = tmp_path / "engine.log"
    log.write_text(f"{READY}\n{JsonLineFormatter('engine').format(record)}\n{READY}\n")
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    assert last_error(log) == f"the step thread died: {said}"


def test_an_engine_without_a_log_has_no_reason(tmp_path: Path) -> None:
    assert last_error(tmp_path / "engine.log") == ""
