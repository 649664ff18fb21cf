"""llama.cpp (`llama-server`), for CPUs and consumer GPUs. Its models are GGUF files.

Its prefix cache cannot be separated by tenant: a prompt is compared with the contents of a slot,
even those of other tenants. `cached_tokens` would show a tenant which prompts of others begin like
its own. Requests therefore disable the cache, unless the deployment says that its tenants may share
one.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from isochrone.service.gguf_metadata import GgufError, attention_size, read_metadata
from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.engines.engine_capabilities import KV_TYPE_BITS
from isochrone.wire.engines.engine_options import FALSE, TRUE
from isochrone.wire.engines.schema_recursion import RECURSION_MAX
from isochrone.wire.engines.shared_prompts import SHARED_CACHE_OPTION, shares_prompts
from isochrone.wire.http import headers
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers.driver import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    UnknownOption,
    check_options,
    cpu_threads,
    flags,
    missing_program,
    read_prometheus,
    require_one_node,
    visible_devices,
)
from nodeagent.drivers.output_parsers import TOOLS_VARIABLE

PROGRAM: Final = "llama-server"
HELP_TIMEOUT_S: Final = 10.0
NO_CACHE: Final = "--no-cache-prompt"
ARGUMENTS: Final = (
    NO_CACHE,
    *("--model", "--alias", "--host", "--ctx-size", "--parallel", "--threads", "--threads-batch"),
    *("--batch-size", "--ubatch-size", "--cache-ram", "--n-gpu-layers", "--device"),
    *("--offline", "--metrics", "--no-slots", "--no-context-shift", "--no-kv-unified"),
    "--no-prefill-assistant",
)
"""The arguments that this driver gives. A version that lacks one of them is refused: releases have
numbers of builds, and only the help shows the options of a build."""

SLOTS_MAX: Final = 32
SLOTS_DEFAULT: Final = 4
"""Sequences at once: at most, if they fit in the KV memory; and without a plan for that memory."""

TEMPLATE_KEY: Final = "tokenizer.chat_template"
"""The key of the chat template in a GGUF file; further templates have a suffix."""

CPU_BATCH_TOKENS: Final = 128
"""Tokens of a step on a CPU. While a step runs, neither health checks that read the statistics nor
other requests are answered: an 8B model prefills some 30 tokens/s on 8 cores."""

CPU_STALL_S: Final = 60.0
"""How long it may be silent on a CPU while it has requests: the plan may set a longer step."""

CACHE_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""The types of the KV cache."""


OWN_FIELDS: Final = (
    *("n_predict", "n_cmpl", "n_probs", "lora", "return_progress"),
    *("chat_format", "chat_parser", "generation_prompt", "message_delimiters"),
    *("grammar_lazy", "grammar_triggers", "grammar_type", "preserved_tokens"),
)
"""Fields of requests (`tools/server/server-schema.cpp`) that clients cannot set. The first ones are
second names of fields that the router has checked, and would replace them; events of progress would
look like first tokens. The others are how the server's own parts tell each other about a chat."""

GRAMMAR_ERROR: Final = b"Unexpected empty grammar stack"

LOGPROBS_MAX: Final = 20
"""As in OpenAI's API. For each token the server would write all of its vocabulary, and hold up all
other requests."""

BREAKERS_MAX: Final = 8
"""Sequence breakers of a request, twice the default. Each is compared with the whole vocabulary
before the first token: 300 kept all other requests waiting for two minutes on a busy machine."""

SAMPLERS_MAX: Final = 32
"""Samplers of a request, each of which sees the whole vocabulary for each token."""


class LlamaCppDriver(EngineDriver):
    """Starts llama.cpp's server on a Unix socket."""

    stats_path = metrics_path = "/metrics"
    # Quantised products depend on the batch.
    resumes = headers.INEXACT
    salted_paths: frozenset[str] = frozenset({CHAT_PATH, COMPLETIONS_PATH})
    sequences_option = "parallel"

    def missing(self) -> str:
        """Return an error message if llama-server is missing or cannot be used, else ""."""
        found = shutil.which(PROGRAM)
        if found is None:
            return missing_program(PROGRAM)
        try:
            return _problem(found, Path(found).stat().st_mtime_ns)
        except OSError as error:
            return f"{PROGRAM} at {found} cannot start: {error}"

    def version(self) -> str:
        """Return when the program was installed: releases have numbers of builds only."""
        found = shutil.which(PROGRAM)
        with suppress(OSError):
            return str(Path(found).stat().st_mtime_ns) if found is not None else ""
        return ""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the server's command. Raises UnknownOption."""
        spec = launch.spec
        check_options(spec)
        require_one_node(spec, "llama.cpp runs on one node; use vllm, sglang or embedded")
        options = dict(spec.engine.options)
        options.pop(SHARED_CACHE_OPTION, None)
        model = gguf_file(launch.model_path)
        cache = _kv_layout(launch, model)
        options["parallel"] = str(cache.slots)
        options["kv_unified"] = str(cache.is_unified).lower()
        on_cpu = spec.device_ids == ("cpu",)
        if on_cpu:
            options.setdefault("batch_size", str(CPU_BATCH_TOKENS))
            options.setdefault("ubatch_size", options["batch_size"])
        options.setdefault("threads", str(launch.threads))
        options.setdefault("threads_batch", options["threads"])
        socket = str(launch.folder / "engine.sock")
        return EngineCommand(
            arguments=(
                *(PROGRAM, "--model", str(model), "--alias", spec.name, "--host", socket),
                *("--ctx-size", str(cache.tokens)),
                *(("--device", "none", "--n-gpu-layers", "0") if on_cpu else _gpu_flags(spec)),
                *("--offline", "--metrics", "--no-slots", "--no-context-shift"),
                # As OpenAI and the other engines: a last message of the assistant is continued only
                # if the request says so.
                "--no-prefill-assistant",
                # The cache of idle slots in host memory takes 8 GiB by default.
                *("--cache-ram", "0", *(() if shares_prompts(spec.engine) else (NO_CACHE,))),
                *flags("llama_cpp", options),
            ),
            base_url="http://localhost",
            socket=socket,
            # It closes connections without saying so in the answer before.
            keep_alive=False,
            environment={**visible_devices(spec), **cpu_threads(launch)},
            may_force_tools=_knows_tools(model),
            stall_s=CPU_STALL_S if on_cpu else 0.0,
            schema_recursion_max=RECURSION_MAX,
            grammar_error=GRAMMAR_ERROR,
            functions_only=True,
            fills_refusals=True,
            field_limits={
                "top_logprobs": LOGPROBS_MAX,
                **dict.fromkeys(("repeat_last_n", "dry_penalty_last_n"), spec.context_tokens),
                "samplers": SAMPLERS_MAX,
                "dry_sequence_breakers": BREAKERS_MAX,
            },
        )

    def body_fields(self, command: EngineCommand, salt: str, priority: int) -> dict[str, Any]:
        """Return the fields that keep a tenant from the prompts of others. There is no priority.

        A ping in a silent stream would look like a token of an engine that has hung.
        """
        values = {"cache_prompt": NO_CACHE not in command.arguments, "id_slot": -1}
        return {**dict.fromkeys(OWN_FIELDS), **values, "sse_ping_interval": -1}

    def read_stats(self, body: bytes) -> EngineStats:
        """Read the requests running and waiting, the speeds and the token counters."""
        found = read_prometheus(body)
        cached = int(found.get("llamacpp:prompt_tokens_cached_total", 0))
        return EngineStats(
            running=int(found.get("llamacpp:requests_processing", 0)),
            waiting=int(found.get("llamacpp:requests_deferred", 0)),
            prefill_tokens_per_s=found.get("llamacpp:prompt_tokens_seconds", 0.0),
            decode_tokens_per_s=found.get("llamacpp:predicted_tokens_seconds", 0.0),
            tokens_out_total=int(found.get("llamacpp:tokens_predicted_total", 0)),
            prompt_tokens_total=int(found.get("llamacpp:prompt_tokens_total", 0)) + cached,
            prefix_hit_tokens_total=cached,
            steps_total=int(found.get("llamacpp:n_decode_total", 0)),
        )


def _knows_tools(model: Path) -> bool:
    """Return whether a model's chat template has tools.

    If it has none, llama.cpp ignores a `tool_choice` that requires a call.
    """
    try:
        metadata = read_metadata(model)
    except GgufError:
        return True  # the engine itself says what is wrong with the file
    templates = (metadata[name] for name in metadata if name.startswith(TEMPLATE_KEY))
    return any(TOOLS_VARIABLE in str(template) for template in templates)


def gguf_file(folder: Path) -> Path:
    """Return the GGUF file of a model's folder: its first part, if it has several.

    Raises UnknownOption if there is none, or more than one model.
    """
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    parts = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
    first = [path for path in files if (m := parts.search(path.name)) is None or m[1] == "00001"]
    if len(first) != 1:
        found = ", ".join(path.name for path in first) or "none"
        raise UnknownOption(
            f"cannot start llama_cpp: it needs a model of one GGUF file, found {found}; convert "
            "the model, or add it to the catalogue with --file"
        )
    return first[0]


class KvLayout(NamedTuple):
    """The KV cache: its slots (sequences at once), its tokens, and whether slots share them all."""

    slots: int
    tokens: int
    is_unified: bool


def _kv_layout(launch: EngineLaunch, model: Path) -> KvLayout:
    """Return the KV cache that fits in the planned memory.

    Each slot has a whole context of its own, which is faster than one cache for all, unless more
    slots are configured than fit in this way. Raises UnknownOption.
    """
    engine, context = launch.spec.engine, launch.spec.context_tokens
    parallel = engine.options.get("parallel", "")
    if parallel and not 0 < (parse_digits(parallel) or 0) <= 1024:
        raise UnknownOption(f"cannot use parallel {parallel!r}: expected a number from 1 to 1024")
    unified = engine.options.get("kv_unified", "").lower()
    is_unified = "kv_unified" in engine.options and unified in TRUE
    kv_bytes = engine.kv_memory_bytes * len(launch.spec.device_ids)
    if not kv_bytes:
        slots = int(parallel) if parallel else SLOTS_DEFAULT
        return KvLayout(slots, slots * context, is_unified)
    tokens = int(kv_bytes / _token_bytes(engine.options, model))
    slots = int(parallel) if parallel else min(SLOTS_MAX, tokens // context)
    must_share = slots * context > tokens
    if tokens < context or (must_share and unified in FALSE):
        sequences = f"{slots} sequences" if slots > 1 else "one sequence"
        raise UnknownOption(
            f"cannot start llama_cpp: {kv_bytes} bytes of KV cache hold {tokens} tokens, too few"
            f" for {sequences} of {context}; raise --kv-bytes or lower --context-tokens"
        )
    return KvLayout(slots, min(tokens, slots * context), is_unified or must_share)


def _token_bytes(options: Mapping[str, str], model: Path) -> float:
    """Return the KV cache of one token in bytes. Raises UnknownOption."""
    kinds = [options.get(name, "f16") for name in ("cache_type_k", "cache_type_v")]
    if unknown := [kind for kind in kinds if kind not in CACHE_TYPES]:
        known = ", ".join(CACHE_TYPES)
        raise UnknownOption(f"cannot use cache type {unknown[0]!r}: expected one of {known}")
    try:
        size = attention_size(model)
    except GgufError as error:
        raise UnknownOption(f"cannot start llama_cpp: {error}") from error
    key_bits, value_bits = (KV_TYPE_BITS[kind] for kind in kinds)
    return (size.keys * key_bits + size.values * value_bits) / 8


def _gpu_flags(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return the flags that put all layers on the GPUs, unless an option says how many."""
    return () if "n_gpu_layers" in spec.engine.options else ("--n-gpu-layers", "all")


@lru_cache(maxsize=16)
def _problem(path: str, _changed_ns: int) -> str:
    """Return what the program at `path` lacks, or "". Raises OSError, which is not cached."""
    try:
        done = subprocess.run(
            [path, "--help"], capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it printed no help within {HELP_TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise OSError(lines[-1][:200])
    known = set(re.findall(r"--[a-z][a-z-]+", done.stdout + done.stderr))
    if lacking := [argument for argument in ARGUMENTS if argument not in known]:
        names = ", ".join(lacking)
        return f"{PROGRAM} at {path} is too old: it has no {names}; install a newer build"
    return ""
